import pytest
import torch
from torch import nn

import qtk
from qtk.export.coreai.library import load
from qtk.export.coreai.lowerings import SiteLowerings
from qtk.runtimes.coreai_file import CoreAiFile
from tests.export.coreai.small_file import needs_converter, small


def test_the_four_ops_of_sites_are_lowered():
    program = torch.export.export(nn.ReLU(), (torch.randn(2),))
    assert {*SiteLowerings(program).by_op} == {
        f"quantized_decomposed::{name}_per_{what}.default"
        for name in ("quantize", "dequantize") for what in ("tensor", "channel")}


@needs_converter
def test_every_site_is_an_operator_and_nothing_else_is():
    text = str(load(small()[2] / "model.aimodel").program)
    assert text.count("coreai.quantize %") == 4  # input, relu, behind the pooling, and the output
    assert text.count("coreai.dequantize %") == 4 + 2  # and two weights
    assert "quantized_decomposed" not in text


@needs_converter
@pytest.mark.parametrize("activation", [
    {"dtype": "int8", "symmetric": True}, {"dtype": "int8", "symmetric": False}, {"dtype": "uint8", "symmetric": False},
])
def test_values_at_the_border_of_two_codes_have_the_code_of_the_simulation(activation, tmp_path):
    x = torch.linspace(-3, 3, 4096).reshape(-1, 4)
    sim = qtk.QuantSim(nn.ReLU6().eval(), x, config={
        "version": 1, "extends": "coreai", "defaults": {"activation": activation}})
    sim.compute_encodings([x], progress=False)
    scale = sim.encodings()["input:input"].scale
    halves = ((torch.arange(-128, 128) + 0.5) * scale).reshape(-1, 4)
    sim.export(tmp_path / "out", formats="coreai", progress=False)
    run = CoreAiFile(tmp_path / "out" / "model.aimodel", {}).run({"input": halves})["output"][0]
    assert torch.equal(run, sim.model(halves))
