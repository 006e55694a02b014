"""Constants that code makes anew in each call, and empty operands of concatenations."""

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.capture.fresh_constants import CAT, DETACH_, LIFT, drop_empty_operands, settle_fresh_constants


class Appends(nn.Module):
    """Appends to an empty tensor, as a cache does."""

    def forward(self, x):
        return torch.cat([torch.tensor([]), x], -1) + torch.tensor([1.0, 2.0])


def exported(model, *args):
    return torch.export.export(model, args).graph_module


def targets(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_a_fresh_constant_is_a_clone_of_its_value():
    x, program = torch.randn(3, 2), torch.export.export(Appends(), (torch.randn(3, 2),))
    assert {DETACH_, LIFT} <= {*targets(program.graph_module)}
    settle_fresh_constants(program.graph)
    assert not {DETACH_, LIFT} & {*targets(program.graph_module)}
    module = program.module()
    drop_empty_operands(module.graph)
    assert CAT not in targets(module)
    module.recompile()
    assert torch.equal(module(x), x + torch.tensor([1.0, 2.0]))


class Joins(nn.Module):
    def __init__(self, join):
        super().__init__()
        self.join = join

    def forward(self, x):
        return self.join(x)


@pytest.mark.parametrize(("join", "operands"), [
    (lambda x: torch.cat([torch.empty(0), x, x]), 2),
    (lambda x: torch.cat([torch.empty(0, 2), x]), 2),  # no empty operand that torch skips, but one of that shape
    (lambda x: torch.cat([torch.empty(0, dtype=torch.float64), x]), 2),  # it decides the dtype
    (lambda x: torch.cat([torch.empty(0), torch.empty(0)]), 2),
])
def test_what_an_operand_decides_is_kept(join, operands):
    x, module = torch.randn(3, 2), exported(Joins(join), torch.randn(3, 2))
    settle_fresh_constants(module.graph)
    drop_empty_operands(module.graph)
    (node,) = module.graph.find_nodes(op="call_function", target=CAT)
    assert len(node.args[0]) == operands
    module.recompile()
    output = module(x)
    assert torch.equal(output[0] if isinstance(output, (list, tuple)) else output, join(x))


def test_a_constant_that_is_written_to_starts_anew_in_each_call():
    class Counts(nn.Module):
        def forward(self, x):
            count = torch.tensor([0.0])
            count.add_(x.sum())
            return x + count

    x = torch.randn(3, 2)
    prepared = qtk.prepare_model(Counts(), x)
    for _ in range(2):
        assert torch.equal(prepared(x), x + x.sum())


def _later(y):
    copied = y.clone()
    before = copied * 2
    copied.detach_()
    return before + copied * y


def _writes(y):
    copied = y.clone()
    copied.detach_()
    copied.add_(1.0)
    return copied * y


@pytest.mark.medium
@pytest.mark.parametrize("function", [
    lambda y: y + y.clone().detach_(), lambda y: y * y.relu().detach_(), _later, _writes,
])
def test_no_gradient_passes_what_was_detached_in_place(function):
    class Stops(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([1.0, -2.0]))

        def forward(self, x):
            return function(x * self.scale)

    model, x = Stops(), torch.randn(3, 2)
    module = exported(model, x)
    settle_fresh_constants(module.graph)
    assert DETACH_ not in targets(module)
    prepared = qtk.prepare_model(copy.deepcopy(model), x)
    model(x).sum().backward()
    prepared(x).sum().backward()
    assert torch.equal(prepared(x), model(x))
    assert torch.allclose(prepared.get_parameter("scale").grad, model.scale.grad)
