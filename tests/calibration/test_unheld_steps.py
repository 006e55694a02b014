"""A layer whose input 8 bits do not hold is computed in float; others, and what rules say, stay."""

import pytest
import torch
from torch import nn

import qtk
from qtk.calibration.unheld_steps import with_float_steps
from qtk.config.load import load_config
from qtk.graph.dynamic_steps import dynamic_steps
from qtk.planning.recurrent_profiles import float_step


def spectra(count=3):
    """Values over seven decades, as of a power spectrum."""
    torch.manual_seed(0)
    return [torch.exp(4 * torch.randn(2, 12, 6) - 8) for _ in range(count)]


def calibrated(data, *rules, base="onnxruntime"):
    torch.manual_seed(0)
    config = {"version": 1, "extends": base, "rules": list(rules)}
    sim = qtk.QuantSim(nn.LSTM(6, 8, 2, batch_first=True).eval(), data[0], config=config)
    sim.compute_encodings(data, progress=False)
    return sim


@pytest.mark.medium
@pytest.mark.parametrize("base", ["onnxruntime", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_a_layer_that_reads_spectra_is_float_and_the_next_is_not(base):
    assert list(dynamic_steps(calibrated(spectra(), base=base).simulation)) == ["lstm.l1"]


@pytest.mark.medium
def test_its_weights_have_all_codes_then():
    specs = {name: each.spec for name, each in calibrated(spectra()).quantizers.items()}
    assert (specs["weight_hh_l0"].qmax, specs["weight_hh_l1"].qmax) == (127, 64)


@pytest.mark.medium
def test_a_layer_that_reads_what_8_bits_hold_is_not():
    assert list(dynamic_steps(calibrated([torch.randn(2, 12, 6)]).simulation)) == ["lstm.l0", "lstm.l1"]


@pytest.mark.medium
def test_data_that_can_be_run_once_are_enough():
    torch.manual_seed(0)
    sim = qtk.QuantSim(nn.LSTM(6, 8, 2, batch_first=True).eval(), spectra()[0], config="onnxruntime")
    sim.compute_encodings(iter(spectra()), progress=False)
    assert list(dynamic_steps(sim.simulation)) == ["lstm.l1"]


@pytest.mark.medium
def test_a_rule_with_a_path_outranks_the_data():
    sim = calibrated(spectra(), {"match": {"path": "lstm.l0"}, "inside": "dynamic"})
    assert list(dynamic_steps(sim.simulation)) == ["lstm.l0", "lstm.l1"]


def test_rules_of_layers_stand_behind_the_last_one_for_nets():
    config, step = load_config("onnxruntime"), float_step("lstm.l0")
    index = with_float_steps(config, [step]).rules.index(step)
    assert config.rules[index - 1].inside == "dynamic"
    assert with_float_steps(load_config("default"), [step]) == load_config("default")
