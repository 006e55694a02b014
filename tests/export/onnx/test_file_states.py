"""Files of models that write buffers, run in ONNX Runtime from the file alone, against the simulation."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx_ir import tensor_adapters
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.export.onnx.file_states import STATES, _decoded, _encoded, file_states
from qtk.runtimes.session import create_session
from tests.zoo.streams import STREAMS, frames, stream

STEPS, MEDIUM = 24, ("cached_conv",)


def deployed(name, folder, **options):
    """The simulation of a stream, calibrated on all of its frames, the frames, and its file."""
    batches = frames(name, 12 if name == "key_value_cache" else STEPS)
    sim = qtk.QuantSim(stream(name), batches[0], **options)
    sim.compute_encodings(batches, progress=False)
    sim.export(folder / "out", formats=("onnx",), check=False)
    return sim, batches, folder / "out" / "model.onnx"


def loop(file, batches, *, optimized=False):
    """The outputs of each call and the states at the end, of a program that has nothing but the file."""
    session, _ = create_session(file, optimized=optimized)
    entries = json.loads(session.get_modelmeta().custom_metadata_map["qtk.states"])
    kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
    ports = {port.name: port for port in session.get_inputs()}
    held = {name: np.full(ports[name].shape, entry["value"], kinds[ports[name].type])
            for name, entry in entries.items()}
    given, returned = [name for name in ports if name not in held], [port.name for port in session.get_outputs()]
    outputs = []
    for batch in batches:
        results = session.run(None, {**dict(zip(given, (each.numpy() for each in batch), strict=True)), **held})
        named = dict(zip(returned, results, strict=True))
        held = {name: named[entry["output"]] for name, entry in entries.items()}
        outputs.append(results[0])
    return outputs, held


@pytest.mark.medium
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name == "streams" else pytest.mark.medium if name in MEDIUM else pytest.mark.slow)
    for name in STREAMS])
def test_a_loop_over_the_file_is_the_simulation_bit_for_bit(name, tmp_path):
    sim, batches, file = deployed(name, tmp_path)
    outputs, held = loop(file, batches)
    with torch.no_grad():
        for batch, output in zip(batches, outputs, strict=True):
            assert np.array_equal(sim.model(*batch).numpy(), output)
    buffers = dict(sim.model.named_buffers())
    assert held
    assert all(np.array_equal(buffers[name].numpy(), value) for name, value in held.items())


@pytest.mark.medium
@pytest.mark.parametrize("name", ["cached_conv", pytest.param("recurrent", marks=pytest.mark.slow)])
def test_with_optimizations_it_stays_beside_the_simulation(name, tmp_path):
    sim, batches, file = deployed(name, tmp_path, config="onnxruntime")
    outputs, _ = loop(file, batches, optimized=True)
    with torch.no_grad():
        expected = torch.stack([sim.model(*batch) for batch in batches]).double()
    error = (expected - torch.from_numpy(np.stack(outputs)).double()).square().sum()
    assert expected.square().sum() > 10 ** 3.5 * error  # 35 dB


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    return deployed("streams", tmp_path_factory.mktemp("streams"))


@pytest.mark.medium
def test_states_are_read_back_with_the_values_that_they_begin_with(streams, tmp_path):
    sim, _, file = streams
    before = sim.model.last.clone()
    with torch.no_grad():
        sim.model.last.copy_(torch.arange(8.0).reshape(2, 4) / 3)
    sim.export(tmp_path / "again", formats=("onnx",), check=False)
    first = sim.model.last.clone()
    sim.model.last.copy_(before)
    assert {name: state.output for name, state in file_states(file).items()} == {
        "recurrent.h": "recurrent.h_out", "recurrent.steps": "recurrent.steps_out", "last": "last_out"}
    again = file_states(tmp_path / "again" / "model.onnx")
    assert torch.equal(again["last"].first, first)
    assert torch.equal(again["recurrent.steps"].first, torch.zeros((), dtype=torch.int64))


@pytest.mark.medium
def test_inputs_that_are_outputs_of_the_call_before_stand_beside_them(tmp_path):
    class Sum(nn.Module):
        def forward(self, x, total):
            return x.relu(), x + total

    x = torch.randn(2, 3)
    sim = qtk.QuantSim(Sum(), (x, x), states={"total": 1})
    sim.compute_encodings([(x, x)], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",), output_names=["y", "next"], check=False)
    (state,) = file_states(tmp_path / "out" / "model.onnx").values()
    assert (state.output, state.first) == ("next", None)


@pytest.mark.medium
def test_broken_metadata_are_named(streams, tmp_path):
    _, _, file = streams
    model = onnx.load(file)
    entry = next(each for each in model.metadata_props if each.key == STATES)
    for broken in ("[", '{"h": 3}', '{"last": {"output": "nothing"}}', '{"last": {"output": "last_out", "data": "?"}}'):
        entry.value = broken
        onnx.save(model, tmp_path / "broken.onnx")
        with pytest.raises(ExportError, match=r"the metadata qtk\.states is broken: .*export the file again"):
            file_states(tmp_path / "broken.onnx")


@pytest.mark.parametrize("value", [
    torch.tensor([[1.5, -2.0], [0.0, 3.25]], dtype=torch.bfloat16), torch.full((2, 3), 0.5, dtype=torch.bfloat16),
    torch.tensor([2**40, -1]), torch.tensor([True, False]), torch.tensor([torch.nan, 1.0]), torch.zeros(0, 4),
])
def test_first_values_are_read_back_in_every_type(value):
    port = ir.Value(name="h", shape=ir.Shape(value.shape),
                    type=ir.TensorType(tensor_adapters.from_torch_dtype(value.dtype)))
    read = _decoded(port, json.loads(json.dumps(_encoded(value))))
    assert read.dtype == value.dtype
    torch.testing.assert_close(read, value, rtol=0, atol=0, equal_nan=True)
