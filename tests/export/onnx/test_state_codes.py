"""States that a file takes and returns as codes: a loop computes what one of floats does."""

import copy
import functools
import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import qtk
from qtk.data.forward_pass import outputs
from qtk.errors import ExportError
from qtk.export.onnx.file_states import STATES
from qtk.export.onnx.state_codes import return_codes
from qtk.runtimes.session import create_session
from qtk.runtimes.state_values import StateCodes

TYPES = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int8)": np.int8, "tensor(uint16)": np.uint16}


class Decoder(nn.Module):
    """Attends to what it has seen so far, [batch, heads, length, width], and to a memory that stays as it is."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], 2, 3).transpose(1, 2)

    def forward(self, x, past, memory):
        past = torch.cat([past, self.heads(self.key(x))], 2)
        query = self.heads(self.query(x))
        return (query @ past.transpose(2, 3)).softmax(-1) @ past + query @ memory @ memory.transpose(2, 3), past, memory


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 6)

    def forward(self, x, h):
        y, h = self.net(x, h)
        return self.head(y), h


X = torch.randn(12, 2, 3, 6, generator=torch.Generator().manual_seed(0))
FIRST = torch.zeros(2, 2, 0, 3), torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(1))


@functools.cache
def prepared():
    torch.manual_seed(0)
    inputs = X[0], torch.randn(2, 2, 4, 3), FIRST[1]
    return qtk.prepare_model(Decoder().eval(), inputs, dynamic_shapes="all"), inputs


def simulation(**rules):
    model, inputs = prepared()
    config = {"version": 1, "rules": [{"match": {"op": op}, "output": rule} for op, rule in rules.items()]}
    sim = qtk.QuantSim(copy.deepcopy(model), inputs, states={"past": 1, "memory": 2}, config=config)
    sim.compute_encodings([(x, *FIRST) for x in X], progress=False)
    return sim


def stream():
    torch.manual_seed(0)
    h = torch.zeros(1, 2, 8)
    sim = qtk.QuantSim(Stream().eval(), (X[0], h), states={"h": 1})
    sim.compute_encodings([(x, h) for x in X], progress=False)
    return sim, (h,)


def loop(file, first, *, optimized=True):
    """The outputs of each run, and the last states."""
    session, _ = create_session(file, optimized=optimized)
    names = [each.name for each in session.get_inputs()]
    codes = StateCodes(file).stored(dict(zip(names[1:], first, strict=True)))
    states = {each.name: codes[each.name].numpy().astype(TYPES[each.type]) for each in session.get_inputs()[1:]}
    found = []
    for x in X:
        y, *after = session.run(None, {names[0]: x.numpy(), **states})
        states = dict(zip(states, after, strict=True))
        found.append(y)
    return found, list(states.values())


def files(sim, folder):
    sim.export(folder / "float", formats="onnx", check=False)
    sim.export(folder / "codes", formats="onnx", check=False, state_codes=True)
    return [folder / each / "model.onnx" for each in ("float", "codes")]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    sim = simulation()
    return sim, files(sim, tmp_path_factory.mktemp("codes"))


@pytest.mark.medium
@pytest.mark.parametrize("optimized", [False, True])
def test_a_loop_of_codes_computes_what_one_of_floats_does(exported, optimized):
    sim, (floats, codes) = exported
    expected, wide = loop(floats, FIRST, optimized=optimized)
    found, narrow = loop(codes, FIRST, optimized=optimized)
    assert all(map(np.array_equal, found, expected))
    assert [each.dtype for each in narrow] == [np.uint8, np.uint8]
    assert 4 * sum(each.nbytes for each in narrow) == sum(each.nbytes for each in wide)
    encoding = sim.encodings()["past:input"]
    assert np.array_equal((narrow[0].astype(np.float32) - float(encoding.zero_point)) * float(encoding.scale), wide[0])


@pytest.mark.medium
def test_the_file_says_which_output_an_input_is_next(exported):
    for file in exported[1]:
        record = {each.key: each.value for each in onnx.load(file).metadata_props}
        assert json.loads(record[STATES]) == {"past": {"output": "output_1", "site": "past:input"},
                                              "memory": {"output": "output_2", "site": "memory:input"}}


@pytest.mark.medium
def test_a_file_of_codes_is_verified_as_one_of_floats_is(exported):
    sim, (_, codes) = exported
    verdict = sim.verify_export(codes.parent, [(x, *FIRST) for x in X[:4]], turns=0, progress=False)
    for run in verdict.runs:
        assert run.refusal is None
        assert min(each.sqnr_db for each in (*run.outputs, *run.sites)) > 60


@pytest.mark.slow
@pytest.mark.medium
@pytest.mark.parametrize(("rule", "dtype"), [
    ({"bits": 8, "symmetric": True, "granularity": "per_channel", "axis": 1}, np.int8),
    pytest.param({"bits": 16}, np.uint16, marks=pytest.mark.slow),
    pytest.param({"bits": 6}, np.uint8, marks=pytest.mark.slow),
])
def test_so_do_scales_for_each_head_and_other_widths(rule, dtype, tmp_path):
    sim = simulation(concat=rule)
    floats, codes = files(sim, tmp_path)
    (expected, _), (found, states) = loop(floats, FIRST), loop(codes, FIRST)
    assert all(map(np.array_equal, found, expected))
    simulated = [output[0].numpy() for output in outputs(sim.model, [(x, *FIRST) for x in X])]
    assert all(np.allclose(a, b, atol=1e-4) for a, b in zip(found, simulated, strict=True))
    assert states[0].dtype == dtype


@pytest.mark.slow
def test_the_state_of_a_recurrent_net_is_quantized_on_its_way_out(tmp_path):
    sim, first = stream()
    floats, codes = files(sim, tmp_path)
    (expected, _), (found, states) = loop(floats, first), loop(codes, first)
    assert all(map(np.array_equal, found, expected))
    assert states[0].dtype == np.uint8


@pytest.mark.slow
def test_what_has_no_codes_is_refused(tmp_path):
    floats = simulation(concat="float", input="float")
    with pytest.raises(ExportError, match=r"state past:input has no codes .* quantize it by a rule"):
        floats.export(tmp_path / "a", formats="onnx", state_codes=True)
    with pytest.raises(ExportError, match="state_codes=True has no effect on the formats encodings"):
        floats.export(tmp_path / "a", formats="encodings", state_codes=True)
    with pytest.raises(ExportError, match=r"codes of past:input are no integers, .* 8 or 16 bits"):
        simulation(concat={"dtype": "fp8_e4m3"}).export(tmp_path / "a", formats="onnx", state_codes=True)
    alone = qtk.QuantSim(nn.Linear(6, 6), X[0])
    alone.compute_encodings([X[0]], progress=False)
    with pytest.raises(ExportError, match=r"the model has no states; name them, QuantSim\(…, states="):
        alone.export(tmp_path / "a", formats="onnx", state_codes=True)


ANOTHER_GRID = """<ir_version: 9, opset_import: ["" : 19]>
g (float[3] h) => (float[3] next, float[3] y) <float scale = {0.5}, uint8 zero = {100}, float other = {0.3}> {
  codes = QuantizeLinear(h, scale, zero)
  real = DequantizeLinear(codes, scale, zero)
  next_codes = QuantizeLinear(real, other, zero)
  next = DequantizeLinear(next_codes, other, zero)
  y = Neg(next)
}"""


def test_an_output_on_another_grid_is_quantized_as_the_next_run_would():
    model = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(ANOTHER_GRID)))
    model.graph.initializers["scale"].name = "h.scale"
    model.metadata_props[STATES] = json.dumps({"h": {"output": "next", "site": "h"}})
    return_codes(model)
    session, _ = create_session(ir.serde.serialize_model(model).SerializeToString(), optimized=False)
    codes, _ = session.run(["next", "y"], {"h": np.array([101, 104, 90], np.uint8)})
    thirds = np.round(np.array([1, 4, -10]) * 0.5 / 0.3) * 0.3
    assert codes.dtype == np.uint8
    assert codes.tolist() == (np.round(thirds / 0.5) + 100).tolist()
