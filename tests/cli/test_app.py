"""The command as users type it."""

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from qtk.cli.app import app
from qtk.config.files import shipped
from tests import fresh


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_recipe_prints_its_table_and_writes_its_results(project, tmp_path):
    result = invoke("quantize", project.recipe())
    assert result.exit_code == 0, result.output
    assert f"accuracy and error on the evaluation data ({project.module}:" in result.stdout.replace("\n", " ")
    assert "W8A8" in result.stdout
    assert f"written to {tmp_path / 'results'}" in result.stdout
    assert "capturing" in result.stderr
    assert (tmp_path / "results" / "summary.json").is_file()


@pytest.mark.medium
def test_the_output_option_goes_before_the_recipe(project, tmp_path):
    assert invoke("quantize", project.recipe(), "--output", tmp_path / "other").exit_code == 0
    assert (tmp_path / "other" / "summary.json").is_file()
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_modules_beside_the_recipe_are_found_from_anywhere(project, tmp_path):
    run = fresh.run_module("qtk.cli.app", "export", project.recipe(), folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "results" / "net" / "w8a8" / "encodings.json").is_file()


@pytest.mark.medium
def test_an_existing_directory_is_one_clean_message(project, tmp_path):
    assert invoke("quantize", project.recipe()).exit_code == 0
    before = sorted((tmp_path / "results").iterdir())
    result = invoke("quantize", project.recipe())
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "--force" in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted((tmp_path / "results").iterdir()) == before
    assert invoke("quantize", project.recipe(), "--force").exit_code == 0


def test_a_mistake_in_the_recipe_is_one_clean_message_with_its_path(project):
    result = invoke("quantize", project.recipe(settings=[{"name": "a", "weight_bits": 99, "activation_bits": 8}]))
    assert result.exit_code == 1
    assert "recipe.yaml: settings[0].weight_bits: got 99; must be at most 16" in result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


def test_the_traceback_is_there_for_those_who_ask(project):
    result = invoke("quantize", project.recipe(scheme="x"), "--traceback")
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert "error: " in result.stderr


def test_wrong_usage_is_exit_code_2():
    assert invoke("quantise").exit_code == 2
    assert invoke("quantize", "--forse").exit_code == 2
    assert invoke("inspect").exit_code == 2


def test_the_version_is_that_of_the_package():
    result = invoke("--version")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"qtk {version('qtk')}, torch {version('torch')}\n"


@pytest.mark.medium
def test_quiet_leaves_progress_out_and_keeps_results(project):
    result = invoke("quantize", project.recipe(), "--quiet")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "W8A8" in result.stdout
    assert invoke("quantize", project.recipe(), "-q").stderr.startswith("error: ")


@pytest.mark.medium
def test_bars_stay_out_of_a_pipe(project):
    settings = [{"name": "a", "weight_bits": 4, "transforms": ["smooth_quant"], "layerwise": ["seq_mse"]}]
    run = fresh.run_module("qtk.cli.app", "quantize", project.recipe(settings=settings))
    assert run.returncode == 0, run.stderr
    assert "calibrating" in run.stderr
    assert "\r" not in run.stderr
    assert "it/s" not in run.stderr
    assert "batch/s" not in run.stderr


def test_compare_prints_a_table_of_sites_for_each_setting(project):
    result = invoke("compare", project.recipe(), "--top", "2")
    assert result.exit_code == 0, result.output
    assert "net, w8a8: worst own error first" in result.stdout
    assert "own SQNR" in result.stdout


def test_inspect_of_a_bare_name_says_what_to_write():
    pytest.importorskip("timm")
    result = invoke("inspect", "resnet18")
    assert result.exit_code == 1
    assert "timm:resnet18" in result.stderr


def test_inspect_prints_the_plan(project):
    result = invoke("inspect", f"{project.module}:net", "--input-shape", "2,6", "--activation-bits", "0")
    assert result.exit_code == 0, result.output
    assert "first.weight" in result.stdout
    assert "uint8" not in result.stdout


def test_inspect_of_an_unknown_model_is_one_clean_message():
    result = invoke("inspect", "demo:digits_cn")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: unknown demo model")


FLOORS = {"digits_cnn": 0.98, "digits_vit": 0.95, "digits_lstm": 0.97, "digits_gru": 0.97}
"""The embedded models and the top-1 each has in float at least."""


QUICK = "digits_cnn"
SEARCH = "auto"
SETTINGS = ("w8a8", "w4a8", SEARCH)


@pytest.fixture(scope="module")
def digits(tmp_path_factory, pytestconfig):
    """The command without arguments, run in an empty directory; ``make test`` runs one model, without the search."""
    pytest.importorskip("sklearn")
    pytest.importorskip("onnxruntime")
    folder, recipe = tmp_path_factory.mktemp("digits"), []
    if pytestconfig.getoption("door") != "all":
        content = yaml.safe_load(shipped("recipes", "digits").read_text(encoding="utf-8"))
        content["models"] = [model for model in content["models"] if model["name"] == QUICK]
        content["settings"] = [setting for setting in content["settings"] if setting["name"] != SEARCH]
        content["onnx_for"].remove(SEARCH)
        recipe = [folder / "digits.yaml"]
        recipe[0].write_text(yaml.safe_dump(content), encoding="utf-8")
    run = fresh.run_module("qtk.cli.app", "quantize", *recipe, folder=folder)
    assert run.returncode == 0, run.stderr
    return folder / "qtk-output", run.stdout


@pytest.fixture
def models(digits, pytestconfig):
    """Model → setting → figures; those that the run must have."""
    found = json.loads((digits[0] / "summary.json").read_text())["models"]
    is_all = pytestconfig.getoption("door") == "all"
    made = {"fp32", *SETTINGS} - (set() if is_all else {SEARCH})
    assert {model: set(settings) for model, settings in found.items()} == dict.fromkeys(
        FLOORS if is_all else [QUICK], made)
    return found


@pytest.mark.slow
def test_without_arguments_the_digits_keep_their_accuracy(models):
    for model, settings in models.items():
        assert settings["fp32"]["top1"] >= FLOORS[model]
        assert abs(settings["w8a8"]["top1"] - settings["fp32"]["top1"]) <= 0.005
        assert settings["w8a8"]["sqnr_db"] > 30 > settings["w4a8"]["sqnr_db"] > 10
        assert settings["w8a8"]["size_bytes"] > settings["w4a8"]["size_bytes"]
        assert settings["auto"]["top1"] >= settings["fp32"]["top1"] - 0.01
        for name in SETTINGS:
            assert settings[name]["onnxruntime_agreement"] >= 0.995
            assert abs(settings[name]["onnxruntime_top1"] - settings[name]["top1"]) <= 0.005


@pytest.mark.slow
def test_without_arguments_table_and_files_are_there(digits, models):
    folder, printed = digits
    assert "ONNX Runtime top-1" in printed
    assert f"ONNX Runtime {version('onnxruntime')}, optimizations on" in printed
    for model in models:
        for setting in SETTINGS:
            assert (folder / model / setting / "model.onnx").is_file()
            assert (folder / model / setting / "encodings.json").is_file()
        assert (folder / "summary.txt").read_text().count(model) == 4


ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
COLUMNS = {"top-1": "top1", "SQNR, dB": "sqnr_db", "size, bytes": "size_bytes",
           "ONNX Runtime top-1": "onnxruntime_top1", "agreement": "onnxruntime_agreement"}
TOLERANCE = {"top1": 0.005, "onnxruntime_top1": 0.005, "onnxruntime_agreement": 0.005, "sqnr_db": 1.0}
"""Other CPUs and threads sum in another order, so that a few of the 540 predictions may change."""


def demo_table(text):
    """The header and the rows of the table of a document."""
    lines = text.partition("<!-- demo-table:begin")[2].partition("<!-- demo-table:end")[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return header, rows


def shown_figures():
    """(model, setting) → the figures that docs/cli.md shows, by their keys in summary.json."""
    header, rows = demo_table(PAGE)
    assert header[2:] == list(COLUMNS)
    return {
        (model, setting.lower()): {key: number(cell) for key, cell in zip(COLUMNS.values(), cells, strict=True)}
        for model, setting, *cells in rows
    }


def number(cell):
    """``99.63 %`` → 0.9963, ``71,367`` → 71367, ``–`` → None."""
    if cell == "–":
        return None
    return float(cell[:-2]) / 100 if cell.endswith(" %") else float(cell.replace(",", ""))


@pytest.mark.slow
def test_the_page_shows_what_a_run_gives(models):
    runs = {(model, setting): record for model, settings in models.items() for setting, record in settings.items()}
    assert {model for model, _ in shown_figures()} == set(FLOORS)
    table = {row: shown for row, shown in shown_figures().items() if row in runs}
    assert list(table) == list(runs)
    (torch_version,) = re.findall(r"measured with PyTorch (\d+\.\d+)", PAGE)
    for row, shown in table.items():
        for key, value in shown.items():
            found = runs[row].get(key)
            if value is None or found is None:
                assert value is found, (row, key)
            elif key != "size_bytes":
                assert abs(found - value) <= TOLERANCE[key], (row, key)
            elif version("torch").startswith(f"{torch_version}."):  # another release writes another graph
                assert found == value, row


def test_the_readme_shows_the_figures_of_the_page():
    """A row a model: top-1 in float, W8A8, W4A8 and by the search, the size of W4A8 over that of float, agreement."""
    figures = shown_figures()
    _, rows = demo_table((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [model for model, *_ in rows] == list(dict.fromkeys(model for model, _ in figures))
    for model, *top1, size, agreement in rows:
        assert [number(cell) for cell in top1] == [figures[model, name]["top1"] for name in ("fp32", *SETTINGS)]
        ratio = figures[model, "w4a8"]["size_bytes"] / figures[model, "fp32"]["size_bytes"]
        assert float(size) == round(ratio, 2)
        assert number(agreement) == min(figures[model, name]["onnxruntime_agreement"] for name in SETTINGS)


@pytest.mark.medium
def test_a_size_is_that_of_the_file(digits, models):
    for model, settings in models.items():
        for setting, record in settings.items():
            assert record["size_bytes"] == (digits[0] / model / setting / "model.onnx").stat().st_size
