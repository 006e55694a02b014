"""``qtk compare``: what it prints is what ``sim.compare`` gives."""

import json
import re

import pytest
from rich.console import Console

import qtk
from qtk.cli.compare import compare
from qtk.cli.model_source import build_model
from qtk.cli.recipe import load_recipe
from qtk.errors import ConfigError
from tests.cli.test_app import invoke

SETTINGS = [{"name": "w8a8"}, {"name": "w2a8", "weight_bits": 2}]


def simulated(project, **settings):
    model = build_model(f"{project.module}:net")
    batches = [inputs for inputs, _ in __import__(project.module).calibration()]
    sim = qtk.QuantSim(model, batches[0], **settings)
    sim.compute_encodings(batches, progress=False)
    return sim, batches


@pytest.mark.medium
def test_the_figures_are_those_of_the_simulation(project):
    result = invoke("compare", project.recipe(settings=SETTINGS), "--json", "--quiet")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    records = json.loads(result.stdout)
    assert [(record["model"], record["setting"]) for record in records] == [("net", "w8a8"), ("net", "w2a8")]
    for record, bits in zip(records, (8, 2), strict=True):
        sim, batches = simulated(project, weight_bits=bits)
        expected = sim.compare(batches, progress=False)
        assert [site["site"] for site in record["sites"]] == [error.site for error in expected]
        assert [site["sqnr_db"] for site in record["sites"]] == pytest.approx([error.sqnr_db for error in expected])


def test_a_search_is_not_made_for_a_comparison(project):
    recipe = load_recipe(project.recipe(settings=[{"name": "found", "auto": {}}]))
    with pytest.raises(ConfigError, match="found: auto is searched anew by every run"):
        compare(recipe, Console(), progress=Console())


@pytest.mark.medium
def test_a_saved_simulation_is_compared_in_place_of_the_settings(project, tmp_path):
    sim, batches = simulated(project, weight_bits=3)
    sim.save(tmp_path / "saved")
    result = invoke("compare", project.recipe(settings=SETTINGS), "--simulation", tmp_path / "saved", "--json")
    assert result.exit_code == 0, result.output
    (record,) = json.loads(result.stdout)
    assert record["sites"][0]["sqnr_db"] == pytest.approx(sim.compare(batches, progress=False)[0].sqnr_db)


@pytest.mark.medium
def test_the_worst_sites_of_one_setting(project):
    result = invoke("compare", project.recipe(settings=SETTINGS), "--setting", "w2a8", "--top", "1")
    assert re.findall(r"net, (\w+): worst", result.stdout) == ["w2a8"]
    sim, batches = simulated(project, weight_bits=2)
    errors = sim.compare(batches, progress=False)
    assert errors[0].site in result.stdout
    assert errors[-1].site not in result.stdout


@pytest.mark.parametrize(("options", "message"), [
    ({"settings": ["w8a9"]}, "--setting: the recipe has none called 'w8a9'; did you mean 'w8a8'"),
    ({"models": ["nett"]}, "--model: the recipe has none called 'nett'; did you mean 'net'"),
    ({"top": 0}, "--top: got 0; must be at least 1"),
    ({"simulation": "x", "settings": ["w8a8"]}, "leave --setting out"),
])
def test_mistakes_are_named_before_anything_runs(project, options, message):
    recipe = load_recipe(project.recipe(settings=SETTINGS, models=[{"name": "net", "model": "not.there:net"}]))
    with pytest.raises(ConfigError, match=re.escape(message)):
        compare(recipe, Console(quiet=True), progress=Console(quiet=True), **options)
