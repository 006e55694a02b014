"""What assign_bits found, as a table and as a config."""

import torch
import yaml
from torch import nn

import qtk
from qtk.auto.bit_assignment import Assigned, BitAssignment, MeasuredWidths
from qtk.config.load import load_config


def made(**options):
    rows = (Assigned("0.weight", ("0.weight", "1.weight"), 8, {4: 0.5, 8: 0.25}),)
    measured = (MeasuredWidths("assigned", 6.0, 0.001, 0.01, True), MeasuredWidths("all 8 bits", 8.0, 0.1, 0.1, False))
    base = load_config("default")
    return BitAssignment("bits a weight", 7.0, rows, measured, ((4.0, 0.5), (6.0, 0.25)), base, base, **options)


def test_tables_show_widths_losses_and_what_was_measured():
    text = str(made())
    assert "bits a weight: 6 of 7" in text
    assert "0.weight and 1 more" in text
    assert "5.0e-01" in text
    assert "30.0" in text  # dB of 0.001
    assert "over the budget" in text
    assert made().cost == 6.0


def test_losses_of_ones_own_are_shown_as_they_are():
    assert "0.001" in str(made(is_loss=True))


def test_widths_that_the_simulation_was_given_are_in_the_config():
    content = made(widths=(4, None)).content()
    assert content["defaults"] == {"weight": {"bits": 4}}
    assert content["extends"] == "default"


def test_a_config_that_is_not_shipped_is_written_whole(tmp_path):
    config = {"version": 1, "rules": [{"match": {"op": "linear"}, "weight": {"bits": 6}}],
              "supergroups": [["linear", "relu"]]}
    x = torch.randn(8, 8)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), x, config=config)
    found = qtk.assign_bits(sim, [x], budget={"weight_bits": 7}, choices=(4, 8), progress=False)
    found.save(tmp_path / "widths.yaml")
    written = yaml.safe_load((tmp_path / "widths.yaml").read_text())
    assert written["rules"][0] == {"match": {"op": ["linear"]}, "weight": {"bits": 6}, "optional": True}
    assert written["supergroups"] == [["linear", "relu"]]
    assert load_config(tmp_path / "widths.yaml").rules == found.config.rules
