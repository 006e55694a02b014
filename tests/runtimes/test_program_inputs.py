import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.runtimes.program_inputs import ProgramInputs


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, frame, state):
        state = torch.tanh(self.linear(frame) + state)
        return state * 2, state


def test_inputs_and_outputs_are_named_in_order_and_called_as_the_model_is(tmp_path):
    frame, state = torch.randn(5, 4), torch.randn(5, 3)
    sim = qtk.QuantSim(Named().eval(), (frame, state), config="xnnpack")
    sim.compute_encodings([(frame, state)], progress=False)
    sim.export(tmp_path / "out", formats="pt2e")
    program = ProgramInputs(tmp_path / "out" / "model.pt2")
    assert (program.names, program.outputs) == (["frame", "state"], ["output_0", "output_1"])
    args, kwargs = program.call({"state": state, "frame": frame})
    with torch.no_grad():
        values = program.by_name(program.program.module()(*args, **kwargs))
        expected = sim.model(frame, state)
    for name, ours in zip(program.outputs, expected, strict=True):
        assert values[name].shape == (1, *ours.shape)
        assert (values[name][0] - ours).abs().max() < 1e-5


def test_another_file_is_refused_with_its_name(tmp_path):
    (tmp_path / "a.pt2").write_bytes(b"nothing")
    with pytest.raises(ExportError, match=r"cannot read .*a\.pt2 as an exported program"):
        ProgramInputs(tmp_path / "a.pt2")
