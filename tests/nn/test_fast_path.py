import torch
from torch import nn

from qtk.nn.fast_path import fast_path_off


def calls_of_linear1(layer, x):
    calls = []
    forward = layer.linear1.forward  # a hook would turn the fast path off
    layer.linear1.forward = lambda *args: calls.append(args) or forward(*args)
    with torch.no_grad():
        layer(x)
    del layer.linear1.forward
    return len(calls)


def test_submodules_are_called_inside_and_the_setting_comes_back():
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    assert calls_of_linear1(layer, x) == 0
    with fast_path_off():
        assert calls_of_linear1(layer, x) == 1
    assert calls_of_linear1(layer, x) == 0
