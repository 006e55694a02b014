"""What is read of simulations, folders and files is the same."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import EncodingError
from qtk.quantizers.quantizer import Mode
from qtk.workflow.quantized_source import quantized_source

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def simulation():
    torch.manual_seed(0)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).eval(), X, weight_bits=4)
    sim.compute_encodings([X], progress=False)
    return sim


@pytest.mark.parametrize("written", ["saved", "integers", pytest.param("exported", marks=pytest.mark.slow)])
def test_a_folder_holds_what_the_simulation_holds(written, tmp_path):
    sim, folder = simulation(), tmp_path / "folder"
    if written == "exported":
        sim.export(folder, formats=("onnx",), check=False)
    else:
        sim.save(folder, weights="integer" if written == "integers" else "float")
    found, expected = quantized_source(folder), quantized_source(sim)
    assert found.encodings.keys() >= expected.encodings.keys() >= {"0.weight", "1:out"}
    assert all(each.equals(found.encodings[name]) for name, each in expected.encodings.items())
    assert expected.constants.keys() >= {"0.weight", "2.weight"}
    assert all(torch.equal(found.constants[name], expected.constants[name]) for name in ("0.weight", "2.weight"))


@pytest.mark.medium
def test_bypassed_sites_dynamic_ones_and_int32_biases_are_read_as_they_are(tmp_path):
    torch.manual_seed(0)
    settings = {"defaults": {"activation": {"bits": 8}, "weight": {"bits": 8, "symmetric": True},
                             "bias": {"dtype": "int32"}},
                "rules": [{"match": {"op": "relu"}, "output": {"bits": 8, "dynamic": True}}]}
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).eval(), X,
                       config={"version": 1, **settings})
    sim.compute_encodings([X], progress=False)
    sim.export(tmp_path / "exported", formats="encodings")
    assert quantized_source(tmp_path / "exported").specs == quantized_source(sim).specs
    sim.quantizers["2:out"].mode = Mode.BYPASS
    sim.save(tmp_path / "saved")
    found, expected = quantized_source(tmp_path / "saved"), quantized_source(sim)
    assert found.specs == expected.specs
    assert "0.bias" in found.encodings
    assert all(each.equals(found.encodings[name]) for name, each in expected.encodings.items())
    assert torch.equal(found.constants["0.bias"], expected.constants["0.bias"])


def test_encodings_are_read_where_there_is_no_file_to_run(tmp_path):
    sim = simulation()
    sim.export(tmp_path / "folder", formats="encodings")
    found = quantized_source(tmp_path / "folder")
    assert found.encodings.keys() == sim.encodings().keys()
    assert quantized_source(tmp_path / "folder" / "encodings.json").encodings.keys() == sim.encodings().keys()
    with pytest.raises(EncodingError, match=r"holds nothing to compare: give what sim\.save"):
        quantized_source(tmp_path / "nothing")
