"""States of a file as codes and as floats."""

import pytest
import torch
from torch import nn

import qtk
from qtk.runtimes.state_values import StateCodes


class Total(nn.Module):
    def forward(self, x, total):
        return x.relu(), total + x


@pytest.mark.medium
@pytest.mark.parametrize("state_codes", [True, False])
def test_only_the_states_of_a_file_of_codes_are_codes(state_codes, tmp_path):
    batches = [(torch.full((2, 3), value), torch.zeros(2, 3)) for value in (0.5, 1.0, -0.25)]
    sim = qtk.QuantSim(Total(), batches[0], states={"total": 1})
    sim.compute_encodings(batches, progress=False)
    sim.export(tmp_path / "out", formats=("onnx",), check=False, state_codes=state_codes)
    codes, given = StateCodes(tmp_path / "out" / "model.onnx"), {"x": batches[0][0], "total": torch.full((2, 3), 0.7)}
    stored = codes.stored(given)
    assert stored["x"] is given["x"]
    encoding = sim.encodings()["total:input"]
    written = (given["total"] / encoding.scale).round() + encoding.zero_point
    assert torch.equal(stored["total"].float(), written if state_codes else given["total"])
    read = codes.reals("output_1", stored["total"])
    torch.testing.assert_close(read, given["total"], atol=float(encoding.scale) / 2 if state_codes else 0.0, rtol=0)
