"""Ranges taken at run time, in ONNX: the numbers of the simulation in ONNX Runtime, bit for bit."""

import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.export.onnx import qdq
from tests.zoo.prepared import slow_but


class Doubled(nn.Module):
    """Only operations that are exact in float32, so that nothing but the quantizers can differ."""

    def forward(self, x):
        return (x * 2).relu() + x


SETTINGS = {
    "uint8": {"bits": 8},
    "uint8_per_token": {"bits": 8, "granularity": "per_token"},
    "int8": {"bits": 8, "symmetric": True},
    "int8_per_token": {"bits": 8, "symmetric": True, "granularity": "per_token"},
    "int8_narrow": {"bits": 8, "symmetric": True, "narrow_range": True, "granularity": "per_token"},
    "uint4": {"bits": 4},
    "int4_per_token": {"bits": 4, "symmetric": True, "granularity": "per_token"},
    "uint6_in_8_bits": {"bits": 6, "granularity": "per_token"},
    "int5_in_8_bits": {"bits": 5, "symmetric": True},
    "uint2_in_4_bits": {"bits": 2, "granularity": "per_token"},
    "uint16": {"bits": 16, "granularity": "per_token"},
    "int12_in_16_bits": {"bits": 12, "symmetric": True},
    "float8": {"dtype": "fp8_e4m3", "granularity": "per_token"},
    "float8_e5m2": {"dtype": "fp8_e5m2"},
}


def simulation(setting, model=None, example=None, **others):
    config = {"version": 1, "defaults": {"activation": {"dynamic": True, **setting}}, **others}
    sim = qtk.QuantSim(model or Doubled(), torch.randn(4, 3, 9) if example is None else example, config=config)
    sim.compute_encodings(None, progress=False)
    return sim


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(SETTINGS, "uint8", "int8_per_token", "uint6_in_8_bits", "uint2_in_4_bits",
                                          "int12_in_16_bits", "float8"))
def test_the_runtime_computes_the_numbers_of_the_simulation(name, tmp_path):
    torch.manual_seed(0)
    sim = simulation(SETTINGS[name])
    data = [torch.randn(4, 3, 9), torch.zeros(2, 3, 9), torch.randn(1, 3, 9) * 1e-20, torch.randn(5, 3, 9) * 1e30,
            torch.rand(2, 3, 9) + 100, -torch.rand(2, 3, 9)]
    with torch.no_grad():
        assert not torch.equal(sim.model(data[0]), Doubled()(data[0]))
    sim.export(tmp_path / "out", formats=("onnx",))
    verified = sim.verify_export(tmp_path / "out", data, turns=0)
    assert (verified.exact.differing, verified.exact.max_difference) == (0, 0)
    assert (verified.optimized.differing, verified.optimized.max_difference) == (0, 0)


def operators(path):
    return {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.medium
def test_uint8_is_the_operator_that_runtimes_know(tmp_path):
    simulation(SETTINGS["uint8"]).export(tmp_path / "out", formats=("onnx",))
    found = operators(tmp_path / "out" / "model.onnx")
    assert {"DynamicQuantizeLinear", "DequantizeLinear"} <= found
    assert not {"QuantizeLinear", "ReduceMax"} & found


@pytest.mark.medium
def test_a_file_holds_the_encodings_there_are(tmp_path):
    torch.manual_seed(0)
    sim = simulation(SETTINGS["int8_per_token"], nn.Sequential(nn.Linear(9, 4), nn.ReLU()).eval(), torch.randn(2, 9))
    sim.export(tmp_path / "out", formats=("onnx",))
    back = qdq.read(tmp_path / "out" / "model.onnx")
    assert list(back) == list(sim.encodings()) == ["0.weight"]
    assert back["0.weight"].equals(sim.encodings()["0.weight"])


@pytest.mark.medium
def test_half_precision_is_computed_in_float32(tmp_path):
    """One quantizer alone: between operators ONNX Runtime's CPU kernels leave the rounding to half precision out."""
    torch.manual_seed(0)
    for name in ("uint8", "int8_per_token"):
        sim = simulation(SETTINGS[name], nn.ReLU(), torch.randn(4, 3, 9).half(), io={"inputs": "float"})
        sim.export(tmp_path / name, formats=("onnx",))
        verified = sim.verify_export(tmp_path / name, [torch.randn(5, 3, 9).half()], turns=0)
        assert verified.exact.max_difference == 0


@pytest.mark.medium
def test_a_row_that_is_the_whole_tensor_is_per_tensor(tmp_path):
    class Summed(nn.Module):
        def forward(self, x):
            return x.sum(0).relu()

    sim = simulation(SETTINGS["int8_per_token"], Summed(), torch.randn(4, 16))
    sim.export(tmp_path / "out", formats=("onnx",))
    data = [torch.randint(-9, 9, (5, 16)).float()]  # their sums are exact
    verified = sim.verify_export(tmp_path / "out", data, turns=0)
    assert verified.exact.max_difference == 0


@pytest.mark.medium
def test_lengths_that_became_fixed_in_an_island_are_known(tmp_path):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x):
            y = self.first(x)
            return self.second(y * 2 if y.sum().item() > 0 else y)

    x = torch.randn(4, 16)
    sim = qtk.QuantSim(Branching().eval(), x, config="dynamic")
    sim.compute_encodings(None, progress=False)
    sim.export(tmp_path / "out", formats=("onnx",))
    assert sim.verify_export(tmp_path / "out", [x], turns=0).exact.max_difference < 1e-5


@pytest.mark.medium
def test_rows_of_a_length_that_is_not_known_are_refused(tmp_path):
    class Flat(nn.Module):
        def forward(self, x):
            return x.reshape(2, -1).relu()

    sim = simulation(SETTINGS["int8_per_token"], Flat(), torch.randn(4, 6))
    with pytest.raises(ExportError, match="only along a last axis of fixed length"):
        sim.export(tmp_path / "out", formats=("onnx",))
    assert not (tmp_path / "out").exists()
    simulation(SETTINGS["int8"], Flat(), torch.randn(4, 6)).export(tmp_path / "out", formats=("onnx",))
