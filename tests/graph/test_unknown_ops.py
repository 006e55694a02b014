import torch
from torch import nn

from qtk.graph.unknown_ops import unknown_ops
from qtk.workflow.prepare import prepare_model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.skipped = nn.Sequential(nn.Linear(4, 4), Lgamma())

    def forward(self, x):
        y = torch.special.i0(x) + torch.special.i0(x * 2)
        return self.skipped(y), torch.bincount(x.flatten().to(torch.int64).abs())


class Lgamma(nn.Module):
    def forward(self, x):
        return torch.lgamma(x)


def test_each_op_with_a_real_result_and_no_row_is_named_once():
    x = torch.rand(2, 4)
    assert unknown_ops(prepare_model(Net(), x, dynamic_shapes=None)) == (
        "aten.special_i0.default", "aten.lgamma.default",
    )


def test_ops_the_user_excluded_are_not_named():
    prepared = prepare_model(Net(), torch.rand(2, 4), dynamic_shapes=None, modules_to_exclude=["skipped"])
    assert unknown_ops(prepared) == ("aten.special_i0.default",)
