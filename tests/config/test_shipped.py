"""The files that come with qtk."""

from pathlib import Path

import pytest

from qtk.config import shipped as module
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
