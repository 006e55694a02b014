import pytest
import torch
from torch import nn

import qtk
from qtk.config.files import shipped_names
from qtk.errors import ExportError
from qtk.runtimes.kinds import RUNTIMES
from qtk.workflow.export import EXPORTERS


@pytest.mark.parametrize("name", list(RUNTIMES))
def test_a_runtime_runs_what_an_exporter_writes_for_targets_that_are_there(name):
    kind = RUNTIMES[name]
    assert kind.name == name
    assert kind.format in EXPORTERS
    assert set(kind.targets) <= set(shipped_names("targets"))
    assert kind.file_name("a.b") == f"a.b{kind.suffix}"


@pytest.mark.parametrize("name", list(RUNTIMES))
def test_a_missing_runtime_names_its_extra(name, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(ExportError, match=rf"{RUNTIMES[name].title} needs the package .*qtk\[{RUNTIMES[name].extra}\]"):
        RUNTIMES[name].require()
    sim = qtk.QuantSim(nn.Linear(4, 2).eval(), torch.randn(8, 4))
    with pytest.raises(ExportError, match=rf"qtk\[{RUNTIMES[name].extra}\]"):
        sim.verify_export(tmp_path, [torch.randn(8, 4)], runtime=name)


def test_extras_of_runtimes_are_those_of_the_package():
    from importlib.metadata import metadata

    assert {kind.extra for kind in RUNTIMES.values()} <= {*metadata("qtk").get_all("Provides-Extra"), "litert"}
