"""Exported programs against the simulation; with scales that are powers of two both round alike, so bit for bit."""

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import qtk
from qtk.calls.inputs import split_inputs
from qtk.core.encoding import Encoding
from qtk.errors import ExportError
from qtk.export.pt2e import compare_with_simulation, read
from qtk.graph.graphs import roots
from qtk.graph.written_buffers import written_buffers
from qtk.quantizers.bias_quantizer import BiasQuantizer
from qtk.torch_private import load_decomposed_ops
from tests.zoo.models import ZOO
from tests.zoo.prepared import simulated, slow_but
from tests.zoo.streams import frames, stream

QUICK = ("residual", "masked_fill", "gathered_experts", "gru", "nested_output", "dataclass_output", "keyword_input")

WITHOUT_QTK = """
import sys, torch, torch.ao.quantization.fx._decomposed
sys.modules["qtk"] = None  # any import of it fails
for folder in sys.argv[1:]:
    args, kwargs = torch.load(folder + "/inputs.pt")
    with torch.no_grad():
        result = torch.export.load(folder + "/export/model.pt2").module()(*args, **kwargs)
    leaves = torch.utils._pytree.tree_leaves(result)
    torch.save([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], folder + "/found.pt")
"""


def round_scales(sim):
    """Rounds every scale to a power of two."""
    for quantizer in sim.quantizers.values():
        encoding = quantizer.encoding
        if encoding is not None and not isinstance(quantizer, BiasQuantizer):
            scale = torch.exp2(torch.log2(encoding.scale).round())
            quantizer.load_encoding(Encoding(encoding.spec, scale, encoding.zero_point))


def exported(sim, folder):
    sim.export(folder, formats="pt2e", force=True)
    return torch.export.load(folder / "model.pt2")


@pytest.fixture(scope="module")
def residual(tmp_path_factory):
    """The file of a simulation, which tests read and leave as it is."""
    folder = tmp_path_factory.mktemp("residual") / "export"
    simulated("residual").export(folder, formats="pt2e")
    return folder / "model.pt2"


def results(model, inputs):
    args, kwargs = split_inputs(inputs)
    with torch.no_grad():
        return [leaf for leaf in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]


def assert_equal(sim, program, inputs):
    expected, found = results(sim.model.eval(), inputs), results(program.module(), inputs)
    assert len(expected) == len(found) > 0
    for left, right in zip(expected, found, strict=True):
        torch.testing.assert_close(right, left, rtol=0, atol=0)


def ops_of(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(ZOO, *QUICK))
def test_the_zoo_computes_the_bits_of_the_simulation_at_another_batch(name, tmp_path):
    sim, entry = simulated(name), ZOO[name]
    if list(roots(sim.model)) != [""]:
        pytest.skip("islands are a file each")
    round_scales(sim)
    program = exported(sim, tmp_path / "export")
    assert not [op for op in ops_of(program) if op.startswith("qtk")]
    assert_equal(sim, program, entry.inputs(3 if entry.dynamic else 2))


@pytest.mark.medium
@pytest.mark.parametrize("names", [["residual", "keyword_input"], pytest.param(ZOO, marks=pytest.mark.slow)],
                         ids=["some", "all"])
def test_a_process_without_qtk_loads_and_runs_the_files(names, tmp_path):
    expected = {}
    for name in names:
        sim, inputs = simulated(name), ZOO[name].inputs(3 if ZOO[name].dynamic else 2)
        if list(roots(sim.model)) == [""]:  # islands are a file each
            round_scales(sim)
            sim.export(tmp_path / name / "export", formats="pt2e")
            torch.save(split_inputs(inputs), tmp_path / name / "inputs.pt")
            expected[name] = results(sim.model.eval(), inputs)
    folders = [str(tmp_path / name) for name in expected]
    subprocess.run([sys.executable, "-c", WITHOUT_QTK, *folders], check=True, cwd=tmp_path)
    for name, tensors in expected.items():
        found = torch.load(tmp_path / name / "found.pt")
        assert len(found) == len(tensors) > 0
        for left, right in zip(tensors, found, strict=True):
            torch.testing.assert_close(right, left, rtol=0, atol=0, equal_nan=True, msg=f"{name} differs")


def settings(weight, activation):
    return {"version": 1, "defaults": {"weight": weight, "activation": activation, "bias": "float"}}


PER_CHANNEL = {"symmetric": True, "granularity": "per_channel"}
FORMATS = {
    "int4 in groups": settings({"dtype": "int4", "symmetric": True, "granularity": "per_block",
                               "block_size": 16}, {"symmetric": False}),
    "uint4 in groups": settings({"dtype": "uint4", "symmetric": False, "granularity": "per_block",
                                "block_size": 8}, {"symmetric": False}),
    "symmetric uint8": settings({"dtype": "uint8", **PER_CHANNEL}, {"dtype": "uint8", "symmetric": True}),
    "int16": settings({"dtype": "int16", **PER_CHANNEL}, {"dtype": "uint16", "symmetric": False}),
    "reduced range": settings({"dtype": "int8", "reduced_range": True, **PER_CHANNEL}, {"symmetric": False}),
    "5 bits": settings({"dtype": "int5", **PER_CHANNEL}, {"dtype": "uint5", "symmetric": False}),
    "fp8": settings({"dtype": "fp8_e4m3", **PER_CHANNEL}, {"dtype": "fp8_e5m2"}),
    "mxfp4": settings({"dtype": "mxfp4"}, {"symmetric": False}),
    "dynamic per token": settings(PER_CHANNEL, {"dtype": "int8", "symmetric": True, "dynamic": True,
                                                "granularity": "per_token"}),
}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x):
        return self.second(nn.functional.gelu(self.norm(self.first(x)))) + x


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS)
def test_formats(config, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(6, 5, 32)
    sim = qtk.QuantSim(Small().eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    round_scales(sim)
    assert_equal(sim, exported(sim, tmp_path / "export"), x)


@pytest.mark.medium
def test_half_precision_is_computed_in_float32_as_in_the_simulation(tmp_path):
    x = torch.randn(4, 5, 32, dtype=torch.bfloat16)
    sim = qtk.QuantSim(Small().eval().bfloat16(), x)
    sim.compute_encodings([x], progress=False)
    round_scales(sim)
    assert_equal(sim, exported(sim, tmp_path / "export"), x)


def test_codes_at_any_scale_differ_by_one_at_most_and_seldom():
    load_decomposed_ops()
    torch.manual_seed(0)
    x, scale = torch.randn(1_000_000), 0.0237
    codes = torch.ops.quantized_decomposed.quantize_per_tensor.default(x, scale, 128, 0, 255, torch.uint8).int()
    simulation = (x / scale).round().add(128).clamp(0, 255).int()
    difference = (codes - simulation).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 1e-5


@pytest.mark.medium
def test_integers_are_stored_and_the_floats_they_stand_for_are_not(residual):
    state = torch.export.load(residual).state_dict
    stored = {name: tensor.dtype for name, tensor in state.items() if name.endswith(".codes")}
    assert stored
    assert set(stored.values()) == {torch.int8}
    weights = [name for name in simulated("residual").encodings() if name.endswith("weight")]
    assert weights
    assert not set(weights) & set(state)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", ["reused_module", "reused_block", "gated"])
def test_each_layer_has_a_bias_of_its_own(name, tmp_path):
    """XNNPACK rounds a bias to the scale of the products of its layer; one that two share got that of the first."""
    sim = simulated(name)
    sim.export(tmp_path / "e", formats=("pt2e",))
    load_decomposed_ops()
    program = torch.export.load(tmp_path / "e" / "model.pt2")
    names = {*program.graph_signature.inputs_to_parameters, *program.graph_signature.inputs_to_buffers}
    vectors = [node for node in program.graph.find_nodes(op="placeholder") if node.name in names
               and node.meta["val"].ndim == 1 and node.meta["val"].is_floating_point()
               and any("linear" in str(user.target) or "conv" in str(user.target) for user in node.users)]
    assert len(vectors) > 1
    assert all(len(node.users) == 1 for node in vectors)


@pytest.mark.medium
def test_what_is_read_back_is_the_simulation(tmp_path):
    sim = simulated("depthwise_separable")
    exported(sim, tmp_path / "export")
    found = read(tmp_path / "export" / "model.pt2")
    expected = sim.encodings()
    assert found.keys() == expected.keys()
    assert all(found[name].equals(expected[name]) for name in expected)


@pytest.mark.medium
def test_a_file_of_other_numbers_is_found(residual):
    sim = simulated("residual")
    (graph,) = roots(sim.model).values()
    compare_with_simulation(residual, graph)
    name, quantizer = next((name, each) for name, each in sim.quantizers.items() if name.endswith("weight"))
    encoding = quantizer.encoding
    with torch.no_grad():
        graph.get_parameter(name).flatten()[0] += 3 * encoding.scale.max()
    with pytest.raises(ExportError, match=f"{name}: the stored integers"):
        compare_with_simulation(residual, graph)
    quantizer.load_encoding(Encoding(encoding.spec, encoding.scale * 2, encoding.zero_point))
    with pytest.raises(ExportError, match=rf"{name}: scale\[0\]"):
        compare_with_simulation(residual, graph)


def test_a_file_that_is_no_program_is_named(tmp_path):
    (tmp_path / "x.pt2").write_bytes(b"nothing")
    with pytest.raises(ExportError, match=r"cannot read .*x\.pt2 as an exported program"):
        read(tmp_path / "x.pt2")


@pytest.mark.medium
def test_the_file_holds_no_paths_of_this_machine(residual):
    with zipfile.ZipFile(residual) as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
    assert str(Path(__file__).parent).encode() not in content
    assert str(Path(torch.__file__).parent).encode() not in content


@pytest.mark.medium
def test_packed_sequences_are_refused_with_the_way_out(tmp_path):
    net = nn.LSTM(8, 8)
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 8), torch.randn(2, 8)])
    sim = qtk.QuantSim(net.eval(), (packed,))
    sim.compute_encodings([(packed,)], progress=False)
    with pytest.raises(ExportError, match="packed sequences"):
        sim.export(tmp_path / "export", formats="pt2e")
    assert not (tmp_path / "export").exists()


@pytest.mark.medium
def test_time_stays_free_where_a_net_is_one_op(tmp_path):
    x = torch.randn(2, 7, 8)
    config = {"version": 1, "extends": "onnxruntime", "rules": [{"match": {"op": "lstm"}, "inside": "float"}]}
    sim = qtk.QuantSim(nn.LSTM(8, 8, batch_first=True).eval(), x, config=config, dynamic_shapes="all")
    sim.compute_encodings([x], progress=False)
    round_scales(sim)
    program = exported(sim, tmp_path / "export")
    assert_equal(sim, program, torch.randn(3, 9, 8))


@pytest.mark.medium
def test_an_axis_that_a_written_out_loop_fixes_is_named(tmp_path):
    x = torch.randn(2, 3, 8)
    sim = qtk.QuantSim(nn.GRU(8, 8, batch_first=True).eval(), x, dynamic_shapes="all")
    sim.compute_encodings([x], progress=False)
    with pytest.warns(match="at length 3 of axis 1 of input alone, which is declared free"):
        program = exported(sim, tmp_path / "export")
    assert_equal(sim, program, x)


@dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


def test_inputs_that_torch_cannot_save_are_named(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, both):
            return self.layer(both.a + both.b)

    x = (Pair(torch.randn(2, 8), torch.randn(2, 8)),)
    sim = qtk.QuantSim(Net().eval(), x)
    sim.compute_encodings([x], progress=False)
    with pytest.raises(ExportError, match=r"an input is a Pair.* makes the Pair itself, or export formats=\('onnx',\)"):
        sim.export(tmp_path / "export", formats="pt2e")


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", ["streams", "average", pytest.param("key_value_cache", marks=pytest.mark.slow)])
def test_buffers_that_forward_writes_are_written_by_the_program_call_after_call(name, tmp_path):
    batches = frames(name, 12)
    sim = qtk.QuantSim(stream(name), batches[0])
    sim.compute_encodings(batches, progress=False)
    round_scales(sim)
    program = exported(sim, tmp_path / "out")
    assert {*program.graph_signature.buffers_to_mutate.values()} == {*written_buffers(sim.model.graph)}
    module, kept = program.module(), []
    with torch.no_grad():
        for batch in batches:
            kept.append((sim.model(*batch), module(*batch)))
    assert all(torch.equal(*pair) for pair in kept), "the last call changed what an earlier one returned, or differs"
