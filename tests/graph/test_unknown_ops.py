import torch
from torch import nn

from qtk.graph.unknown_ops import unknown_ops
from qtk.workflow.prepare import prepare_model


class Net(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.code, self.fc = code, nn.Linear(4, 4)

    def forward(self, x):
        return self.code(self.fc(x))


def unknown(code):
    return unknown_ops(prepare_model(Net(code), torch.rand(2, 4), verify=False))


def test_ops_without_a_row_are_named_once_in_order():
    assert unknown(lambda x: torch.special.i1(torch.special.i0(torch.special.i1(x)))) == (
        "aten.special_i1.default", "aten.special_i0.default")


def test_known_ops_and_results_that_are_no_floats_are_none():
    assert unknown(lambda x: torch.relu(x)) == ()
    assert unknown(lambda x: (x, torch.bucketize(x, torch.tensor([0.0, 1.0])), torch.isfinite(x))) == ()
