"""A step that is left out of a graph without what it needs would change nothing there."""

import sys

import pytest

import qtk
from qtk.core import needs
from tests.exported_files import not_run
from tests.zoo.models import ZOO
from tests.zoo.prepared import pair, simulated


@pytest.fixture
def all_run(monkeypatch):
    """From the call on, no step is left out. Returns the needs that the graph did not have."""
    missing = []

    def concerned(steps, contents):
        for step in steps:
            missing.extend([step.needs] if step.needs and step.needs.isdisjoint(contents()) else [])
            yield step

    def found_where(needs, contents, analysis, otherwise):
        missing.extend([needs] if needs.isdisjoint(contents) else [])
        return analysis()

    def start():
        for module in [module for name, module in sys.modules.items() if name.startswith("qtk.")]:
            for name, other in (("concerned", concerned), ("found_where", found_where)):
                if vars(module).get(name) is getattr(needs, name) and module is not needs:
                    monkeypatch.setattr(module, name, other)
        return missing

    return start


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ZOO)
def test_of_the_planner(name, all_run):
    prepared, inputs = pair(name)[1], ZOO[name].inputs()
    plan = str(qtk.QuantSim(prepared, inputs).plan)
    missing = all_run()
    assert str(qtk.QuantSim(prepared, inputs).plan) == plan
    assert missing


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", ZOO)
def test_of_calibration_and_export(name, all_run, tmp_path):
    def written(folder):
        sim = simulated(name)
        with not_run():
            sim.export(tmp_path / folder, formats=("encodings_json", "onnx"))
        return {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}

    before = written("before")
    missing = all_run()
    assert written("after") == before
    assert missing
