"""The tables of widths in targets.md are what the shipped targets say, and what exported files show."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import qtk
from qtk.config.files import shipped_names
from qtk.config.load import load_config
from qtk.config.runtime import Runtime
from tests.docs.pages import DOCS, page

sys.path.insert(0, str(DOCS / "hooks"))
table = import_module("target_table")
sys.path.pop(0)

COLUMNS = {16: "16 bits", 8: "8 bits", 4: "4 bits", 3: "2–3 bits"}


@pytest.fixture(scope="module")
def layers() -> tuple[qtk.PreparedModel, torch.Tensor]:
    x = torch.randn(8, 64)
    return qtk.prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), x), x


def cells(role: str) -> dict[str, dict[str, str]]:
    """Target → column → cell of a table of the page."""
    rows = re.findall(r"^\|(.*)\|$", page("targets.md").partition(f"<!-- {role}:begin")[2].partition("<!--")[0], re.M)
    head, _, *lines = ([cell.strip() for cell in row.split("|")] for row in rows)
    return {line[0].strip("`"): dict(zip(head, line, strict=True)) for line in lines}


@pytest.mark.medium
def test_the_page_has_the_tables_of_the_shipped_targets() -> None:
    assert page("targets.md") == table.written(page("targets.md"))


@pytest.mark.parametrize("role", table.ROLES)
def test_every_target_has_a_row_and_a_format_that_it_uses_itself(role: str) -> None:
    rows = cells(role)
    assert sorted(rows) == shipped_names("targets")
    for name, row in rows.items():
        own = row["by itself"].partition(",")[0].replace("fp4_e2m1", "nvfp4")
        assert own == "float" or any(own in row[width] for width in table.WIDTHS), name


@pytest.mark.medium
@pytest.mark.parametrize(("target", "weight_bits", "activation_bits"), [
    ("onnxruntime", 3, 4), ("onnxruntime", 8, 16), ("openvino", 4, 16), ("dynamic", 4, 4), ("dynamic_per_token", 4, 8)])
def test_an_exported_file_keeps_its_rules_where_the_table_has_its_formats(
    target: str, weight_bits: int, activation_bits: int, tmp_path: Path, layers: tuple[qtk.PreparedModel, torch.Tensor]
) -> None:
    model, x = layers
    sim = qtk.QuantSim(model, x, config=target, weight_bits=weight_bits, activation_bits=activation_bits)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",))
    (check,) = qtk.check_target(tmp_path / "out")
    broken = {each.rule.of for each in check.violations}
    for role, bits in (("weights", weight_bits), ("activations", activation_bits)):
        assert (role in broken) == (cells(role)[target][COLUMNS[bits]] == "–"), check


@pytest.mark.parametrize(("column", "weights", "activations"), [
    ("W8A8", "8 bits", "8 bits"), ("W4A8", "4 bits", "8 bits"), ("W4A16 (weights alone)", "4 bits", None),
    ("W4A4", "4 bits", "4 bits")])
def test_a_runtime_runs_a_width_only_if_the_rules_of_its_target_allow_it(
    column: str, weights: str, activations: str | None
) -> None:
    text = page("targets.md").partition("| runtime, target |")[2].partition("\n\n")[0]
    head = ["W8A8", "W4A8", "W4A16 (weights alone)", "W4A4"]
    forbidden = set()
    for row in re.findall(r"^\|([^-].*)\|$", text, re.MULTILINE):
        runtime, *answers, _ = (cell.strip() for cell in row.split("|"))
        targets = re.findall(r"`(\w+)`", runtime)
        if targets and not any(cells("weights")[each][weights] != "–" and (
                activations is None or cells("activations")[each][activations] != "–") for each in targets):
            assert dict(zip(head, answers, strict=True))[column] == "no", runtime
            forbidden.add(runtime)
    assert forbidden


def changed(target: str, old: str, new: str) -> Runtime:
    text = load_config(target).runtime.model_dump_json()
    assert old in text
    return Runtime.model_validate_json(text.replace(old, new))


def test_a_changed_rule_changes_the_table() -> None:
    runtime = load_config("tensorrt").runtime
    narrower = changed("tensorrt", '"dtype":["int8","int4"]', '"dtype":["int8"]')
    assert table.allowed(runtime, "weights", "int4")
    assert not table.allowed(narrower, "weights", "int4")
    blocks = load_config("vllm_w4a16").runtime
    assert table.granularities(table.allowed(blocks, "weights", "int4")) == "channel, block of 32, 64, 128"
