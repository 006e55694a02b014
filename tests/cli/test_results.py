"""The directory of results grows by whole settings."""

import json

import pytest

from qtk.cli.results import Results
from qtk.errors import ConfigError, ExportError
from qtk.report.summary import Score


def finish(results, model, setting, value=1.0):
    with results.setting(model, setting) as folder:
        folder.mkdir(parents=True)
        (folder / "file").write_text("whole")
        results.add(model, setting, Score(value, None))


def test_the_directory_appears_with_the_first_setting(tmp_path):
    with Results(tmp_path / "out", force=False, metric="m") as results:
        finish(results, "net", "fp32")
        assert not (tmp_path / "out").exists()
        finish(results, "net", "a")
        assert (tmp_path / "out" / "net" / "fp32" / "file").exists()
        finish(results, "net", "b")
        assert set(json.loads((tmp_path / "out" / "summary.json").read_text())["models"]["net"]) == {"fp32", "a", "b"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_finished_is_the_first_error_and_leaves_nothing(tmp_path):
    def fail():
        with Results(tmp_path / "out", force=False, metric="m") as results:
            finish(results, "net", "fp32")
            for name in ("first", "second"):
                with results.setting("net", name):
                    raise ConfigError(name)

    with pytest.raises(ConfigError, match="first"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_half_a_setting_is_removed(tmp_path):
    with Results(tmp_path / "out", force=False, metric=None) as results:
        finish(results, "net", "a")
        with results.setting("net", "b") as folder:
            folder.mkdir()
            (folder / "file").write_text("half")
            raise ConfigError("b")
    assert sorted(path.name for path in (tmp_path / "out" / "net").iterdir()) == ["a"]
    assert results.summary.failed() == "net b failed: ConfigError: b"


def test_a_place_that_is_taken_is_refused_at_once(tmp_path):
    (tmp_path / "out" / "net").mkdir(parents=True)
    with pytest.raises(ExportError, match="exists already"), Results(tmp_path / "out", force=False, metric="m"):
        pytest.fail("the body must not run")


def test_a_directory_is_not_replaced_while_its_run_goes_on(tmp_path):
    out = tmp_path / "out"
    with Results(out, force=False, metric="m") as results:
        finish(results, "net", "a")
        with pytest.raises(ExportError, match="out is being written by another run"), \
                Results(out, force=True, metric="m"):
            pytest.fail("the body must not run")
        finish(results, "net", "b")
    with Results(out, force=True, metric="m") as results:
        finish(results, "net", "c")
    assert sorted(path.name for path in (out / "net").iterdir()) == ["c"]


def publish_after(first, out):
    with Results(out, force=True, metric="m") as second:
        finish(first, "net", "a")
        finish(second, "net", "b")


def test_of_two_runs_the_first_to_finish_a_setting_has_the_directory(tmp_path):
    out = tmp_path / "out"
    with Results(out, force=True, metric="m") as first:
        with pytest.raises(ExportError, match="another run"):
            publish_after(first, out)
        finish(first, "net", "c")
    assert sorted(path.name for path in (out / "net").iterdir()) == ["a", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_that_failed_holds_nothing(tmp_path):
    def interrupted():
        with Results(tmp_path / "out", force=False, metric="m") as results:
            finish(results, "net", "a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with Results(tmp_path / "out", force=True, metric="m") as results:
        finish(results, "net", "b")
