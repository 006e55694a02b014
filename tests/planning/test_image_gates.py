"""Where a value times its gate is planned as two ops: on images that no matrix product makes."""

import pytest
import torch
from torch import nn

import qtk
from qtk.planning.image_gates import is_image_gate

SHAPES = {
    "convolution": (nn.Conv2d(3, 4, 1), (2, 3, 5, 5), True), "linear": (nn.Linear(5, 4), (2, 3, 5, 5), False),
    "sequence": (nn.Conv1d(3, 4, 1), (2, 3, 5), False),
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_gates_of_images(name):
    layer, shape, wanted = SHAPES[name]
    graph = qtk.prepare_model(nn.Sequential(layer, nn.SiLU()).eval(), torch.randn(shape)).graph
    (silu,) = [node for node in graph.nodes if node.target is torch.ops.aten.silu.default]
    assert is_image_gate(silu) is wanted
