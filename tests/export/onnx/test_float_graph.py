"""Every quantized value is a tensor of the float file, under its name in an encodings file."""

import json

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import qtk
from qtk.aimet.tensor_names import tensor_names
from qtk.calls.inputs import input_leaves, split_inputs
from qtk.errors import ExportError
from qtk.export.onnx import float_graph
from qtk.graph.insert import quantizer_called
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode
from qtk.runtimes.session import create_session
from tests.zoo.experts import TRACES_GROUPED_PRODUCTS
from tests.zoo.models import ZOO
from tests.zoo.prepared import simulated, slow_but

FLOAT_ROUNDING = 1e-5
"""Of sums in another order, relative to values of about 1."""


class Recorder(fx.Interpreter):
    """The values that quantizers of the outer graph read, by site."""

    def __init__(self, model):
        super().__init__(model)
        self.values = {}

    def run_node(self, n):
        if quantizer_called(n) is not None:
            self.values[n.meta["custom"]["qtk_site"]] = self.env[n.args[0]]
        return super().run_node(n)


def leaves_of(sim, inputs):
    given = input_leaves(sim.model.graph, *split_inputs(inputs))
    return [leaf for leaf in given if isinstance(leaf, Tensor)]


def run_with(path, names, leaves):
    """The tensors of these names, computed by ONNX Runtime; those in the bodies of loops cannot be returned."""
    model = onnx.load(path)
    made = {name for node in model.graph.node for name in node.output}
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name in made - known)
    session, _ = create_session(model.SerializeToString(), optimized=False, threads=1)
    fed = {value.name: leaf.numpy() for value, leaf in zip(session.get_inputs(), leaves, strict=True)}
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    outputs = [value.name for value in session.get_outputs()]
    return constants | fed | dict(zip(outputs, session.run(outputs, fed), strict=True))


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(
    ZOO, "residual", "vit", "gru", "concatenated", "dict_output", "intermediate_outputs", "reused_module", "tied",
    *["grouped_experts"] * TRACES_GROUPED_PRODUCTS,
))
def test_every_name_is_that_of_its_value(name, tmp_path):
    entry, sim = ZOO[name], simulated(name)
    sim.export(tmp_path / "out", formats="aimet_2.0.0")
    data = json.loads((tmp_path / "out" / "encodings_aimet_2.0.0.json").read_text())
    names = {record["name"] for record in data["encodings"]}
    path = tmp_path / "out" / "float" / "model.onnx"
    sites = tensor_names(sim.model)
    assert names == set(sites)
    assert names <= float_graph.read_names(path)
    assert set(sites.values()) == {site.name for site in sim.plan}

    leaves = leaves_of(sim, entry.inputs())
    with in_mode(sim.quantizers.values(), Mode.BYPASS), torch.no_grad():
        expected = [leaf.numpy() for leaf in pytree.tree_leaves(entry.run(sim.model)) if isinstance(leaf, Tensor)]
        recorder = Recorder(sim.model)
        recorder.run(*input_leaves(sim.model.graph, *split_inputs(entry.inputs())))
    values = run_with(path, names, leaves)
    outputs = [value.name for value in onnx.load(path).graph.output]
    for output, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(values[output], wanted, rtol=FLOAT_ROUNDING, atol=FLOAT_ROUNDING)
    at_top = [name for name in names if name in values and sites[name] in recorder.values]
    assert len(at_top) >= len(recorder.values) > 0
    for each in at_top:
        wanted = recorder.values[sites[each]].detach().numpy()
        np.testing.assert_allclose(values[each], wanted, rtol=FLOAT_ROUNDING, atol=FLOAT_ROUNDING, err_msg=each)


@pytest.mark.slow
def test_the_files_with_and_without_quantizers_share_their_names(tmp_path):
    sim = simulated("vit", config="onnxruntime")
    sim.export(tmp_path / "out", formats=("onnx", "aimet_1.0.0", "aimet_0.6.1"))
    names = set(tensor_names(sim.model))
    for file, others in (("model.onnx", {"patch.weight"}), ("float/model.onnx", set())):  # a fourth channel of zeros
        found = float_graph.read_names(tmp_path / "out" / file)
        assert names - found == others
        assert {f"{name}/padded" for name in others} <= found
    float_model = onnx.load(tmp_path / "out" / "float" / "model.onnx")
    assert not {node.op_type for node in float_model.graph.node} & {"QuantizeLinear", "DequantizeLinear"}
    quantized = onnx.load(tmp_path / "out" / "model.onnx")
    for part in ("input", "output"):
        assert [value.name for value in getattr(float_model.graph, part)] == [
            value.name for value in getattr(quantized.graph, part)]


class OneReaderInFewBits(nn.Module):
    """A value is read in float, and by one operator in integers: only there it has an encoding."""

    def __init__(self, before):
        super().__init__()
        self.a, self.b, self.before = nn.Linear(4, 4), nn.Linear(4, 4), before

    def forward(self, x):
        x = self.before(x)
        return self.a(x), self.b(x)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("before", [nn.Identity(), nn.Tanh()])
def test_a_value_that_is_quantized_for_one_reader_alone_is_a_tensor_of_its_own(before, tmp_path):
    x = torch.randn(3, 4)
    config = {"version": 1, "io": {"inputs": "float", "outputs": "quantized"}, "defaults": {
        "weight": {"symmetric": True}, "activation": {"symmetric": False}},
        "rules": [{"match": {"path": "b"}, "input": {"bits": 8}},
                  {"match": {"path": "before"}, "output": "float", "optional": True}]}
    sim = qtk.QuantSim(OneReaderInFewBits(before).eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    (edge,) = [name for name in sim.quantizers if name.startswith("b:in")]
    sim.export(tmp_path / "out", formats="aimet_1.0.0")
    graph = onnx.load(tmp_path / "out" / "float" / "model.onnx").graph
    (identity,) = [node for node in graph.node if node.output[0] == edge]
    (source,) = identity.input
    assert identity.op_type == "Identity"
    assert (source == "x") is isinstance(before, nn.Identity)
    assert sorted(node.op_type for node in graph.node if source in node.input) == ["Gemm", "Identity"]
    assert [node.op_type for node in graph.node if edge in node.input] == ["Gemm"]


@pytest.mark.medium
def test_a_parameter_called_like_an_input_gets_another_name(tmp_path):
    class Awkward(nn.Module):
        def __init__(self):
            super().__init__()
            self.output = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return torch.nn.functional.linear(x, self.output)

    x = torch.randn(3, 4)
    sim = qtk.QuantSim(Awkward(), x)
    sim.compute_encodings([x], progress=False)
    names = tensor_names(sim.model)
    assert names == {"x": "x:input", "output_1": "output", "output": "linear:out"}
    sim.export(tmp_path / "out", formats="aimet_1.0.0")
    graph = onnx.load(tmp_path / "out" / "float" / "model.onnx").graph
    assert ([value.name for value in graph.output], [each.name for each in graph.initializer]) == (
        ["output"], ["output_1"])
    again = qtk.QuantSim(Awkward(), x)
    again.load_encodings(tmp_path / "out" / "encodings_aimet_1.0.0.json")
    assert all(again.encodings()[name].equals(each) for name, each in sim.encodings().items())


@pytest.mark.medium
def test_a_name_that_is_lost_is_an_error(tmp_path, monkeypatch):
    sim = simulated("residual")
    monkeypatch.setattr(float_graph, "read_names", lambda path: {"input"})
    with pytest.raises(ExportError, match="is quantized, and in no float ONNX file"):
        sim.export(tmp_path / "out", formats="aimet_1.0.0")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_onnx_file_has_no_names(tmp_path):
    (tmp_path / "x.onnx").write_text("no")
    with pytest.raises(ExportError, match=r"cannot read .*x\.onnx as ONNX"):
        float_graph.read_names(tmp_path / "x.onnx")


@pytest.mark.medium
def test_a_site_without_a_name_is_an_error(tmp_path):
    sim = simulated("residual")
    names = tensor_names(sim.model)
    del names[next(name for name, site in names.items() if site.endswith(":input"))]
    with pytest.raises(ExportError, match=r"input: .* has no name"):
        float_graph.export(sim.model, sim.example_inputs, tmp_path / "model.onnx", names)


@pytest.mark.medium
def test_an_input_that_is_returned_keeps_its_name_and_a_buffer_is_an_input(tmp_path):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", torch.zeros(2, 3))

        def forward(self, x):
            before = self.last.clone()
            self.last.copy_(x)
            return before, x.relu()

    x = torch.randn(2, 3)
    sim = qtk.QuantSim(Last(), x)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=("aimet_1.0.0",))
    session, _ = create_session(tmp_path / "out" / "float" / "model.onnx")
    assert [port.name for port in session.get_inputs()] == ["x", "last"]
    assert [port.name for port in session.get_outputs()] == ["output_0", "output_1", "last_out"]
    before, _, after = session.run(None, {"x": x.numpy(), "last": 2 * x.numpy()})
    assert np.array_equal(before, 2 * x.numpy())
    assert np.array_equal(after, x.numpy())
