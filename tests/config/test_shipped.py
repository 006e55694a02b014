"""The files that come with qtk."""

from pathlib import Path

import pytest

from qtk.config import shipped as module
from qtk.config.load import load_config
from qtk.config.shipped import shipped, shipped_names
from qtk.errors import ConfigError


def test_the_shipped_targets_are_files():
    assert {"default", "onnxruntime"} <= set(shipped_names("targets"))
    assert all(shipped("targets", name).is_file() for name in shipped_names("targets"))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="no target called 'defualt' comes with qtk; did you mean 'default'"):
        shipped("targets", "defualt")


def test_an_installed_package_holds_them_inside(tmp_path, monkeypatch):
    inside = tmp_path / "qtk" / "configs" / "targets"
    inside.mkdir(parents=True)
    (inside / "mine.yaml").write_text("version: 1\n")
    monkeypatch.setattr(module, "files", lambda package: Path(tmp_path) / package)
    assert shipped("targets", "mine") == inside / "mine.yaml"


@pytest.mark.parametrize("name", shipped_names("targets"))
def test_a_target_names_one_for_its_runtime_that_is_dynamic(name):
    runtime = load_config(name).runtime
    if runtime is not None and runtime.dynamic is not None:
        other = load_config(runtime.dynamic)
        assert other.runtime is not None
        assert other.runtime.contrib_operators == runtime.contrib_operators
        assert other.defaults.activation.dynamic
