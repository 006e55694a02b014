"""Finished trials come back in the next run of the same settings, and in no other."""

import json
import math

import pytest

from qtk.auto.choices import Choices
from qtk.auto.ranking import Ranking
from qtk.auto.trial_log import FILE, Measured, TrialLog
from qtk.errors import ConfigError

RUN = {"metric": "top1", "held_out": 2, "widths": (4, None)}
RESULTS = {
    Choices("min_max"): Measured(0.5, 0.25, 0.0),
    Choices("mse", ("equalize",), ("gptq",), ("a:out", "ü")): Measured(0.1 + 0.2, 1e-300, -1.0),
    Choices("mse"): Measured(0.0, failure="failed: ValueError: \"no luck\""),
    Choices("tf_enhanced"): Measured(3.0, math.inf),
}


def written(directory, run=RUN):
    log = TrialLog(directory, run)
    for choices, measured in RESULTS.items():
        log.add(choices, measured)
    return log


def test_every_result_comes_back(tmp_path):
    folder = tmp_path / "a" / "b"  # which is made
    ranking = Ranking(("b", "ü"), {"b": 1e-300, "a": math.inf})
    written(folder).add_ranking(Choices("mse"), ranking)
    again = TrialLog(folder, RUN)
    assert {choices: again.find(choices) for choices in RESULTS} == RESULTS
    assert again.ranking(Choices("mse")) == ranking
    assert again.ranking(Choices("min_max")) is None
    assert again.find(Choices("entropy")) is None
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_a_result_is_on_disk_as_soon_as_it_is_added(tmp_path):
    log = TrialLog(tmp_path, RUN)
    assert TrialLog(tmp_path, RUN).ranking(Choices("mse")) is None
    for count, (choices, measured) in enumerate(RESULTS.items(), 1):
        log.add(choices, measured)
        assert TrialLog(tmp_path, RUN).find(choices) == measured
        assert len(json.loads((tmp_path / FILE).read_text(encoding="utf-8"))["trials"]) == count


def test_the_last_result_of_the_same_choices_counts(tmp_path):
    log = written(tmp_path)
    log.add(Choices("min_max"), Measured(9.0, 0.125))
    for each in (log, TrialLog(tmp_path, RUN)):
        assert each.find(Choices("min_max")) == Measured(9.0, 0.125)


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = written(None)
    log.add_ranking(Choices("mse"), Ranking(("a",), {}))
    assert log.find(Choices("min_max")) == RESULTS[Choices("min_max")]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("other", "named"), [
    ({"metric": "loss"}, "metric"), ({"held_out": 2.5, "metric": None}, "metric, held_out"), ({"new": 0}, "new"),
])
def test_another_run_is_refused_by_the_settings_that_differ(other, named, tmp_path):
    written(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ConfigError, match=rf"trials.json is of another run \({named} differ\)"):
        TrialLog(tmp_path, RUN | other)
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"run": {}, "rankings": [], "trials": [{}]}',
                                  '{"run": {}, "rankings": [], "trials": [{"choices": {"scheme": "mse"}}]}',
                                  '{"run": {}, "rankings": [{}], "trials": []}'])
def test_a_file_that_holds_no_trials_is_refused(text, tmp_path):
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no trials that can be read"):
        TrialLog(tmp_path, RUN)
    assert (tmp_path / FILE).read_text(encoding="utf-8") == text
