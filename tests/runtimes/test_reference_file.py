import torch
from torch import nn

import qtk
from qtk.analysis.simulated_values import SimulatedValues
from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.graph.graphs import roots
from qtk.runtimes.reference_file import (
    RANDOM_BATCHES,
    InputTensor,
    LiteRtReference,
    ProgramReference,
    random_batches,
    step_of_encoding,
)
from tests.export.litert.small_file import needs_converter, small


def uint8(zero_point: int) -> Encoding:
    return Encoding(QuantSpec(dtype("uint8"), symmetric=False), torch.tensor([0.1]),
                    torch.tensor([zero_point], dtype=torch.int32))


def test_a_program_has_the_outputs_and_sites_of_the_simulation(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)).eval()
    x = torch.randn(4, 3, 6, 6)
    sim = qtk.QuantSim(model, x, config="xnnpack")
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats="pt2e")
    reference = ProgramReference(tmp_path / "out" / "model.pt2")
    simulated = SimulatedValues(roots(sim.model)[""], {"input:input": 0, "1:out": 0, "3:out": 0})
    with torch.no_grad():
        expected = sim.model(x)
    sites = simulated.take()
    (output,), found = reference.values({"input": x})
    step = sim.encodings()["3:out"].scale
    assert (output - expected).abs().max() <= step * 1.01
    assert ((output - expected).abs() > step / 2).double().mean() < 0.01
    for name in ("input:input", "1:out"):
        assert (found[name, 0] - sites[name, 0].value).abs().max() <= sim.encodings()[name].scale * 1.01
    assert [each and each.scale for each in reference.output_encodings] == [step]
    assert reference.inputs == [InputTensor("input", (None, 3, 6, 6), torch.float32)]


@needs_converter
def test_a_litert_file_runs_by_its_reference_kernels():
    sim, x, folder = small()
    reference = LiteRtReference(folder / "model.tflite")
    (output,), _ = reference.values({"input": x[:1]})
    with torch.no_grad():
        assert (output - sim.model(x[:1])).abs().max() <= 2 * sim.encodings()["3:out"].scale
    assert reference.output_encodings[0].equals(reference.encodings["3:out"])
    assert reference.inputs == [InputTensor("input", (1, 3, 6, 6), torch.float32)]


def test_random_values_fill_the_range_of_an_input():
    encoding = uint8(zero_point=100)
    inputs = [InputTensor("x", (None, 300), torch.float32), InputTensor("ids", (2, None), torch.int64),
              InputTensor("free", (500,), torch.float32)]
    batches = random_batches(inputs, {"x:input": encoding})
    assert len(batches) == RANDOM_BATCHES
    x, ids, free = batches[0].values()
    assert -10 <= x.min() < -9.5
    assert 15 < x.max() <= 15.5
    assert set(ids.flatten().tolist()) <= {0, 1}
    assert free.std() > 0.8
    assert torch.equal(random_batches(inputs, {"x:input": encoding})[0]["x"], x)


def test_the_step_of_a_value_broadcasts():
    encoding = uint8(zero_point=3)
    step = step_of_encoding(torch.zeros(2, 3), encoding)
    assert torch.allclose(step.expand(2, 3), torch.full((2, 3), 0.1))
    assert step_of_encoding(torch.zeros(2), None) is None
