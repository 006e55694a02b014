"""Which ops of two graphs of one module are the same."""

import pytest
import torch
from torch import nn

from qtk.capture.correspondence import corresponding
from qtk.workflow.prepare import prepare_model


class Sums(nn.Module):
    """The same kinds of ops in one module, some of which a mask adds in front and between."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask=None, skip=False):
        if mask is not None:
            x = x + (mask + 1.0)
        y = x if skip else x + self.a(x)
        return torch.cat([y + self.b(y), y])


X, MASK = torch.randn(3, 4), torch.randn(3, 4)


def pairs(first, second):
    """Name of an op of the second graph → name in the first, of additions and what is concatenated."""
    model = Sums()
    main, other = (prepare_model(model, inputs) for inputs in (first, second))
    found = corresponding(main.graph, other.graph)
    return {node.name: same.name for node, same in found.items() if node.op == "call_function"}


@pytest.mark.medium
def test_ops_that_one_graph_has_alone_stand_for_what_they_are_computed_from():
    assert pairs((X,), (X, MASK)) == {"linear": "linear", "add_2": "add", "linear_1": "linear_1", "add_3": "add_1",
                                      "cat": "cat"}
    assert pairs((X, MASK), (X,)) == {"linear": "linear", "add": "add_2", "linear_1": "linear_1", "add_1": "add_3",
                                      "cat": "cat"}


def test_a_branch_left_out_leaves_the_others():
    assert pairs((X,), {"x": X, "skip": True}) == {"linear": "linear_1", "add": "add_1", "cat": "cat"}


@pytest.mark.medium
def test_equal_graphs_correspond_op_by_op():
    found = pairs((X, MASK), (X, MASK))
    assert found == {name: name for name in found}
    assert len(found) == 7


def test_other_constants_are_other_ops():
    class Scaled(nn.Linear):
        def forward(self, x, factor=2.0):
            return super().forward(x) * factor

    main, other = (prepare_model(Scaled(4, 4), inputs) for inputs in (X, {"x": X, "factor": 3.0}))
    assert [node.name for node in corresponding(main.graph, other.graph) if node.op == "call_function"] == ["linear"]
