import torch
from torch import nn

from qtk.nn.device import device_of


def test_the_device_is_that_of_the_first_tensor_else_the_cpu():
    buffers = nn.Module()
    buffers.register_buffer("mean", torch.zeros(1, device="meta"))
    assert device_of(buffers).type == "meta"
    assert device_of(nn.Sequential(nn.ReLU(), nn.Linear(2, 2, device="meta"))).type == "meta"
    assert device_of(nn.Linear(2, 2)).type == device_of(nn.ReLU()).type == "cpu"
