"""Stand-ins take the place of what functionalization would lose, and of nothing else."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtk.capture.train_mode.markers import BATCH_NORM, DETACH, DROPOUT, INSTANCE_NORM, mark, purify
from qtk.workflow.prepare import prepare_model

X = torch.randn(3, 4, 6)
STAND_INS = (BATCH_NORM, DETACH, DROPOUT, INSTANCE_NORM)


class Function(nn.Module):
    def __init__(self, code, *modules):
        super().__init__()
        self.code, self.parts = code, nn.ModuleList(modules)

    def forward(self, x):
        return self.code(x, *self.parts)


def marked(model):
    program = torch.export.export(model.eval(), (X,), strict=False)
    names = [node.name for node in program.graph.nodes]
    mark(program.graph_module)
    assert names == [node.name for node in program.graph.nodes if node.target is not DETACH]
    return program, [node for node in program.graph.nodes if node.target in STAND_INS]


@pytest.mark.medium
@pytest.mark.parametrize(("function", "kind"), [
    (lambda x: F.dropout(x, 0.3, training=False), "dropout"),
    (lambda x: F.dropout1d(x, 0.3, training=False), "feature_dropout"),
    (lambda x: F.alpha_dropout(x, 0.3, training=False), "alpha_dropout"),
])
def test_dropout_keeps_its_rate_and_kind(function, kind):
    program, (node,) = marked(Function(function))
    assert node.target is DROPOUT
    assert node.args[1:] == (0.3, False, kind)
    kept = program.run_decompositions({})  # which drops eval-mode dropout that is not marked
    assert DROPOUT in [node.target for node in kept.graph.nodes]


@pytest.mark.medium
@pytest.mark.parametrize(("norm", "stand_in"), [
    (nn.BatchNorm1d(4), BATCH_NORM),
    (nn.InstanceNorm1d(4, track_running_stats=True), INSTANCE_NORM),
    (nn.InstanceNorm1d(4), None),
    (nn.LayerNorm(6), None),
])
def test_norms_with_running_statistics_are_marked(norm, stand_in):
    program, found = marked(Function(lambda x, norm: norm(x), norm))
    assert [node.target for node in found] == ([stand_in] if stand_in else [])
    if stand_in:
        assert found[0].args[6:8] == (norm.momentum, norm.eps)
        assert [node.target for node in program.run_decompositions({}).graph.nodes].count(stand_in) == 1


@pytest.mark.medium
def test_what_leaves_a_region_without_gradients_is_detached():
    def code(x):
        with torch.no_grad():
            y = x * 2
        return x + y

    program, _ = marked(Function(code))
    inside = [graph for graph in program.graph_module.children() if isinstance(graph, torch.fx.GraphModule)]
    assert [node.target for graph in inside for node in graph.graph.nodes].count(DETACH) == 1
    flat = program.run_decompositions({})
    assert [node.target for node in flat.graph.nodes].count(DETACH) == 1


@pytest.mark.medium
def test_what_a_region_without_gradients_writes_is_detached():
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("last", torch.zeros(2, 4))

        def forward(self, x):
            y = self.fc(x)
            with torch.no_grad():
                self.mean.lerp_(y.mean(0), 0.1)
                self.last[0].copy_(y[0])
            return y - self.mean - self.last

    torch.manual_seed(0)
    model = Averaged()
    prepared, x = prepare_model(copy.deepcopy(model).eval(), torch.randn(2, 4)), torch.randn(2, 4)
    for module in (model.train(), prepared.train()):
        for _ in range(3):
            module(x).square().sum().backward()
    assert not prepared.mean.requires_grad
    assert not prepared.last.requires_grad
    for (name, value), other in zip(prepared.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(value, other, msg=name)
    torch.testing.assert_close(prepared.fc.weight.grad, model.fc.weight.grad)


def ops(forward, *inputs):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, *xs):
            return forward(self.fc, *xs)

    program = torch.export.export(Net().eval(), inputs, strict=False)
    purify(program.graph)
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


MATRIX = torch.randn(2, 4)


def test_an_activation_over_a_fresh_value_becomes_pure():
    assert ops(lambda fc, x: fc(x).relu_(), MATRIX) == ["aten.linear.default", "aten.relu.default"]
    found = ops(lambda fc, x: fc(x).add_(x).clamp_(min=0), MATRIX)
    assert found == ["aten.linear.default", "aten.add.Tensor", "aten.clamp.default"]


def test_a_value_that_is_read_before_and_after_becomes_pure():
    def forward(fc, x):
        y = fc(x)
        twice = y * 2
        y.relu_()
        return twice + y

    found = ops(forward, MATRIX)
    assert found == ["aten.linear.default", "aten.mul.Tensor", "aten.relu.default", "aten.add.Tensor"]


def test_values_written_at_indices_become_pure():
    def forward(fc, x):
        order = torch.argsort(x[:, 0])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(x))
        values, experts = fc(x).topk(2)
        values /= values.sum(-1, keepdim=True)
        return values[back] * 2 + experts

    found = ops(forward, MATRIX)
    assert {"aten.index_put.default", "aten.div.Tensor"} <= {*found}
    assert not [name for name in found if "_.default" in name or "_.Tensor" in name]


def test_sizes_may_be_written():
    def forward(fc, x):
        y = fc(x)
        y.clamp_(max=x.shape[0])
        return y.masked_fill_(y > 0, x.shape[0])

    program = torch.export.export(Function(lambda x, fc: forward(fc, x), nn.Linear(6, 6)), (X[0],),
                                  dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    purify(program.graph)
    assert not [node.name for node in program.graph.nodes if str(node.target).startswith("aten.clamp_.")]


@pytest.mark.parametrize("write", [lambda y: y.gt_(0.5), lambda y: y.logical_not_(), lambda y: y.pow_(2)])
def test_an_op_stays_whose_pure_form_has_another_dtype_or_other_arguments(write):
    def forward(fc, x):
        y = fc(x)
        write(y)
        return y * 2

    assert any("_." in name for name in ops(forward, MATRIX))


def test_a_value_of_which_there_is_a_view_stays():
    def forward(fc, x):
        y = fc(x)
        row = y[0]
        y.relu_()
        return row + y

    assert "aten.relu_.default" in ops(forward, MATRIX)


def test_a_view_and_an_input_stay():
    assert "aten.relu_.default" in ops(lambda fc, x: fc(x).view(-1).relu_(), MATRIX)
    assert "aten.mul_.Tensor" in ops(lambda fc, x: x.mul_(2.0), MATRIX)


def test_an_operand_of_another_dtype_stays():
    found = ops(lambda fc, x: fc(x).half().float().add(0).add_(x.double()), MATRIX)
    assert "aten.add_.Tensor" in found
