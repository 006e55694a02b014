"""The op that marks quantized values."""

import torch
from torch import nn

from qtk.export.onnx.site_markers import SITE_MARKER, is_marker


class Marked(nn.Module):
    def forward(self, x):
        return SITE_MARKER(x * 2, "mul:out") + 1


def test_a_marker_is_one_op_of_a_program_and_copies_its_value():
    program = torch.export.export(Marked(), (torch.ones(3),))
    (marker,) = filter(is_marker, program.graph.nodes)
    assert marker.args[1] == "mul:out"
    value = torch.ones(3)
    copied = SITE_MARKER(value, "x")
    assert torch.equal(copied, value)
    assert copied.data_ptr() != value.data_ptr()
