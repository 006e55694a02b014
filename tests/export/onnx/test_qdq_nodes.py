"""One marker at a time, by the rules of ``lower``: the nodes it becomes, and what they are called."""

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from qtk.core.granularity import PerChannel
from qtk.errors import ExportError
from qtk.export.onnx.marked_graph import DOMAIN, trace
from qtk.export.onnx.onnxruntime.passes import BEFORE_SITES_ARE_LISTED, FilePurpose, run_passes
from qtk.export.onnx.qdq_nodes import qparam_name, replace_markers
from qtk.export.simulated_sites import simulated_sites
from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds
from tests.export.onnx.onnxruntime.test_fused_activations import Convolutions
from tests.export.onnx.simulated import activations, nothing, simulate, symmetric

X = torch.randn(2, 8)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return torch.relu(x) @ self.w.t()


def lowered(*, weight=nothing, activation=nothing, x=X, model=None):
    torch.manual_seed(0)
    sim = simulate(model or Scaled(), x, weight=weight, activation=activation)
    sites = simulated_sites(sim)
    traced = trace(sim, sites, x, opset=21)
    names = replace_markers(traced, sites, opset=21)
    run_passes(BEFORE_SITES_ARE_LISTED, traced.model, names, FilePurpose(21))
    assert DOMAIN not in {node.domain for node in traced.model.graph}
    assert DOMAIN not in traced.model.opset_imports
    return traced.model.graph


def kinds(graph):
    return [node.op_type for node in graph]


@pytest.mark.medium
def test_a_constant_is_stored_as_codes_under_the_name_of_its_site():
    choice = symmetric("int8", PerChannel(0))
    graph = lowered(weight=lambda site, value: choice(site, value) if site == "w" else None)
    assert "QuantizeLinear" not in kinds(graph)
    node = next(node for node in graph if node.op_type == "DequantizeLinear")
    codes, scale, zero = node.inputs
    assert (codes.name, codes.dtype, codes.is_initializer()) == ("w", ir.DataType.INT8, True)
    assert (scale.name, zero.name) == (qparam_name("w", "scale"), qparam_name("w", "zero_point"))
    assert node.attributes["axis"].as_int() == 0


@pytest.mark.medium
def test_a_value_keeps_its_name_in_front_of_the_pair():
    graph = lowered(activation=lambda site, value: activations()(site, value) if site == "relu:out" else None)
    (quantize,) = (node for node in graph if node.op_type == "QuantizeLinear")
    assert quantize.inputs[0].name == "relu:out"
    assert quantize.inputs[0].producer().op_type == "Relu"
    assert [user.op_type for user in quantize.outputs[0].consumers()] == ["DequantizeLinear"]


@pytest.mark.medium
def test_an_input_keeps_its_own_name_and_the_site_reads_it_through_identity():
    graph = lowered(activation=lambda site, value: activations()(site, value) if site == "x:input" else None)
    assert graph.inputs[0].name == "x"
    (identity,) = (node for node in graph if node.op_type == "Identity")
    assert (identity.inputs[0].name, identity.outputs[0].name) == ("x", "x:input")


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize(("choice", "clips"), [
    (activations("uint8"), []), (activations("uint6"), ["Clip"]),
    (activations("int6", PerChannel(1), symmetric=True), ["Max", "Min"]),
    (activations("int8", PerChannel(1), symmetric=True, narrow_range=True), ["Max"]),
])
def test_codes_narrower_than_their_type_are_clipped_to_the_reals_of_the_bounds(choice, clips):
    graph = lowered(activation=lambda site, value: choice(site, value) if site == "relu:out" else None)
    found = [node.op_type for node in graph if node.op_type in ("Clip", "Max", "Min") and len(node.inputs) > 1]
    assert found == clips  # Max of one input keeps float weights in float


@pytest.mark.medium
def test_other_floats_are_cast_before_and_back_after():
    graph = lowered(activation=activations(), model=Scaled().half(), x=X.half())
    for node in graph:
        if node.op_type == "QuantizeLinear":
            assert node.inputs[0].producer().op_type == "Cast"
            (back,) = (user for user in node.outputs[0].consumers()[0].outputs[0].consumers())
            assert (back.op_type, back.outputs[0].dtype) == ("Cast", ir.DataType.FLOAT16)


@pytest.mark.medium
def test_a_site_that_is_not_in_the_graph_is_named():
    sim = simulate(Scaled(), X, activation=nothing)
    sites = simulated_sites(sim)
    traced = trace(sim, [], X, opset=21)
    with pytest.raises(ExportError, match="w is quantized in the model, but the exported graph does not use its value"):
        replace_markers(traced, sites, opset=21)


@pytest.mark.medium
def test_biases_in_int32_store_no_zero_points(tmp_path):
    exported(Convolutions(nn.ReLU()), torch.randn(2, 3, 8, 8), tmp_path / "out")
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    inputs = {node.name: list(node.input) for node in graph.node if node.op_type == "DequantizeLinear"}
    assert len(inputs["up.bias"]) == 2
    assert not any("bias.zero_point" in tensor.name for tensor in graph.initializer)
    assert optimized_kinds(tmp_path / "out")["QLinearConv"] == 2
