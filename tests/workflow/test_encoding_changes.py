"""The methods are tested where what they call is; here that they are public and reach it."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ArgumentError, CalibrationError
from qtk.workflow.encoding_changes import EncodingChanges


def test_the_methods_of_a_simulation():
    assert issubclass(qtk.QuantSim, EncodingChanges)
    x = torch.randn(4, 3)
    sim = qtk.QuantSim(nn.Linear(3, 2).eval(), x)
    sim.compute_encodings([x], progress=False)
    sim.set_range("linear:out", -1.0, 1.0)
    sim.unfreeze()
    sim.freeze("weight")
    assert [name for name, each in sim.quantizers.items() if each.frozen] == ["weight"]
    sim.forget("linear:out")
    assert "linear:out" not in sim.encodings()
    with pytest.raises(CalibrationError, match="no site is called 'out'"):
        sim.forget("out")
    with pytest.raises(ArgumentError, match="source"):
        sim.load_encodings(3)
