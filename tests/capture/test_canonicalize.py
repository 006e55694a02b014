import pytest
import torch
from torch import nn

from qtk.calls.inputs import split_inputs
from qtk.capture.canonicalize import canonicalize
from qtk.capture.prepared_model import PreparedGraph
from qtk.capture.torch_export import capture
from tests.zoo.models import ZOO


def canonical(model, x):
    return canonicalize(capture(model.eval(), (x,), {}, "batch").program, model, PreparedGraph)[0]


def targets(prepared):
    return [str(node.target) for node in prepared.graph.nodes]


@pytest.mark.medium
def test_the_graph_is_functional_and_without_guards():
    for name in ("in_place", "residual", "inverted_residual"):
        prepared = canonical(ZOO[name].model(), ZOO[name].inputs())
        ops = [node.target for node in prepared.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        assert not any(op._schema.is_mutable for op in ops)
        assert not any("assert" in target or "_guards" in target for target in targets(prepared))
        assert not any("qtk" in str(node.target) for node in prepared.graph.nodes if node.op == "call_function")


@pytest.mark.medium
def test_ops_that_rules_name_stay_whole():
    seen = set()
    for name in ("vit", "norms", "gated", "fused_attention", "functional"):
        entry = ZOO[name]
        captured = capture(entry.model(), *split_inputs(entry.inputs()), "batch")
        seen |= set(targets(canonicalize(captured.program, entry.model(), PreparedGraph)[0]))
    for op in ("conv2d", "linear", "layer_norm", "gelu", "softmax.int", "matmul", "group_norm", "instance_norm",
               "rms_norm", "glu", "einsum"):
        assert f"aten.{op}" in seen or f"aten.{op}.default" in seen, op


def test_unread_parameters_are_kept_and_not_read():
    prepared = canonical(ZOO["tied"].model(), ZOO["tied"].inputs())
    assert "unused" in prepared.state_dict()
    assert not {"unused", "never.weight"} & set(targets(prepared))


@pytest.mark.medium
def test_a_write_into_a_slice_gives_its_gradient_to_what_is_written():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.narrow = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            y = self.fc(x).double()
            y[:, 1:3].copy_(self.narrow(x))  # cast and expanded on the way
            return y

    model, x = Net(), torch.randn(3, 4)
    prepared = canonical(model, x)
    assert torch.equal(prepared(x), model(x))
    assert prepared(x).dtype is torch.float64
    for parameter in model.parameters():
        expected, found = (torch.autograd.grad(m(x).square().sum(), parameter)[0] for m in (model, prepared))
        assert torch.equal(found, expected)
    (expanded,) = prepared.graph.find_nodes(op="call_function", target=torch.ops.aten.expand_as.default)
    assert expanded.meta["val"].dtype is torch.float32
    assert expanded.meta["val"].shape[1] == 2


@pytest.mark.medium
def test_mixed_precision_regions_become_casts():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.fc(x)
            with torch.autocast("cpu", enabled=False):
                return self.fc(y.float())

    model, x = Net(), torch.randn(3, 4)
    prepared = canonical(model, x)
    assert torch.equal(prepared(x), model(x))
    assert not any("autocast" in target for target in targets(prepared))


@pytest.mark.medium
def test_a_write_over_everything_keeps_the_dtype():
    class Net(nn.Module):
        def forward(self, x):
            y = torch.zeros_like(x, dtype=torch.float64)
            y.copy_(x)
            return y

    x = torch.randn(3, 4)
    assert canonical(Net(), x)(x).dtype is torch.float64


@pytest.mark.medium
def test_slices_that_take_all_are_gone():
    class Net(nn.Module):
        def forward(self, x):
            y = x[:, :, 1:] * 2
            y[:, 0, :] = 1.0
            return y[:, ::2][:, :, :-1]

    model, x = Net(), torch.randn(3, 4, 5)
    prepared = canonical(model, x)
    assert torch.equal(prepared(x), model(x))
    slices = [node.args[1:] for node in prepared.graph.nodes if str(node.target) == "aten.slice.Tensor"]
    assert [args[0] for args in slices] == [2, 1, 2]
    assert not any("slice_scatter" in target for target in targets(prepared))


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))
        self.square = nn.Parameter(torch.randn(4, 4))
        self.one = nn.Parameter(-torch.ones(1, 1))
        self.register_buffer("basis", torch.randn(5, 4))

    def forward(self, x):
        row = x[0]
        return (
            x @ self.weight.T, torch.mm(row, self.weight.t()), torch.addmm(self.bias, row, self.weight.transpose(0, 1)),
            x @ self.square.permute(1, 0), row[0] @ self.weight.mT,
            x @ self.square, x @ self.square.permute(0, 1), x @ self.basis.T,
            torch.addmm(row[:, :1], row, self.weight.T), torch.addmm(self.bias, row, self.weight.T, alpha=2.0),
            x @ (self.weight * 2).T, x @ torch.linalg.inv(self.square), x @ self.one.abs().expand(4, 1),
            x[..., :1] @ self.one.abs(), torch.addmm(self.bias[:1], row, self.weight.T),
        )


def test_products_with_a_transposed_parameter_are_linear():
    model, x = Turned(), torch.randn(2, 3, 4)
    prepared = canonical(model, x)
    seen = [target for target in targets(prepared) if target in
            ("aten.linear.default", "aten.matmul.default", "aten.mm.default", "aten.addmm.default")]
    assert seen == ["aten.linear.default"] * 5 + ["aten.matmul.default"] * 3 + ["aten.addmm.default"] * 2 + [
        "aten.matmul.default"] * 4 + ["aten.addmm.default"]
    assert all(torch.equal(own, other) for own, other in zip(prepared(x), model(x), strict=True))


@pytest.mark.parametrize("ends", [(0, 0.7), (-0.5, 1), (0, 1), (None, 1), (0, None)])
def test_bounds_of_floats_are_floats(ends):
    class Clamps(nn.Module):
        def forward(self, x):
            return x.clamp(*ends)

    x = torch.randn(3, 4)
    prepared = canonical(Clamps(), x)
    (node,) = [node for node in prepared.graph.nodes if "clamp" in str(node.target)]
    assert not any(type(end) is int for end in node.args[1:])
    assert torch.equal(prepared(x), x.clamp(*ends))
