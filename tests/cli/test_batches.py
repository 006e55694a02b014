"""Data that a recipe names."""

import importlib
from itertools import islice

import pytest
import torch

from qtk.cli.batches import Batches
from qtk.errors import ConfigError


@pytest.mark.medium
def test_every_pass_starts_anew(project):
    batches = Batches(f"{project.module}:evaluation", "data.evaluation")
    first, second = (list(batches.open()[0]) for _ in range(2))
    assert len(first) == len(second) == 2
    assert all((a[0] == b[0]).all() for a, b in zip(first, second, strict=True))


def test_the_number_of_batches_is_known_if_the_source_tells(project):
    assert Batches(f"{project.module}:calibration", "x").open()[1] == 3
    assert Batches(f"{project.module}:evaluation", "x").open()[1] is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "data.x: user_.*:nothing gave no batch"),
        ("bare", r"data.x: batch 0 of user_.*:bare has type Tensor; must be a pair \(inputs, label\)"),
        ("triples", r"batch 0 of user_.*:triples has 3 elements; must be a pair"),
        ("number", r"number\(\) returned a int; it must return an iterable"),
        ("broken", "raised KeyError"),
        ("stops", r"data.x: user_.*:stops, while batches are read, called sys.exit\(0\), which ends"),
        ("breaks", r"data.x: user_.*:breaks, while batches are read, raised OSError: disk"),
        ("unstarted", r"data.x: user_.*:unstarted, while batches are read, raised OSError: no worker"),
        ("VALUE", "is a int; it must be callable"),
    ],
)
def test_what_is_no_data_is_answered_with_its_key(project, name, said):
    with pytest.raises(ConfigError, match=said):
        list(Batches(f"{project.module}:{name}", "data.x").open()[0])


def test_batches_without_labels_are_inputs_where_no_label_is_read(project):
    ((inputs, label),) = Batches(f"{project.module}:bare", "data.calibration", labelled=False).open()[0]
    assert isinstance(inputs, torch.Tensor)
    assert label is None
    pairs = list(Batches(f"{project.module}:evaluation", "data.calibration", labelled=False).open()[0])
    assert all(len(inputs) == len(label) for inputs, label in pairs)


COUNTED = """
import torch
taken = []

def batches():
    while True:
        taken.append(len(taken))
        yield torch.zeros(2, 6), torch.zeros(2)
"""


STREAM = """
import torch
from torch.utils.data import DataLoader, IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(6), 0)] * 4)

def batches():
    return DataLoader(Stream(), batch_size=2)
"""


def test_a_loader_without_a_length_is_a_source_without_one(project):
    (project.folder / f"{project.module}_stream.py").write_text(STREAM)
    pairs, count = Batches(f"{project.module}_stream:batches", "data.calibration").open()
    assert (count, len(list(pairs))) == (None, 2)


def test_so_many_batches_are_taken_and_not_one_more(project):
    (project.folder / f"{project.module}_counted.py").write_text(COUNTED)
    pairs, count = Batches(f"{project.module}_counted:batches", "data.calibration", 3).open()
    assert (count, len(list(pairs))) == (3, 3)
    assert importlib.import_module(f"{project.module}_counted").taken == [0, 1, 2]


def test_a_length_below_the_number_wanted_is_the_number(project):
    assert Batches(f"{project.module}:calibration", "data.calibration", 5).open()[1] == 3
    assert Batches(f"{project.module}:calibration", "data.calibration", 2).open()[1] == 2


@pytest.mark.medium
def test_a_source_that_may_be_endless_is_warned_of_with_its_key(project, monkeypatch):
    monkeypatch.setattr("qtk.cli.batches.MANY_BATCHES", 20)
    pairs, count = Batches(f"{project.module}:endless", "data.calibration").open()
    assert count is None
    first = list(islice(pairs, 20))
    with pytest.warns(UserWarning, match=r"data\.calibration: .*:endless has no length and gave 20 batches so far"):
        next(pairs)
    assert len([*first, *islice(pairs, 100)]) == 120  # and no second warning


def test_a_long_source_is_taken_whole(project, monkeypatch):
    monkeypatch.setattr("qtk.cli.batches.MANY_BATCHES", 1)
    with pytest.warns(UserWarning, match="gave 1 batches so far"):
        assert len(list(Batches(f"{project.module}:evaluation", "data.evaluation").open()[0])) == 2
    assert len(list(Batches(f"{project.module}:evaluation", "data.evaluation", 2).open()[0])) == 2


def test_a_calibration_without_an_end_is_refused_with_its_key(project):
    batches = Batches(f"{project.module}:endless", "data.calibration")
    with pytest.raises(ConfigError, match=r"data\.calibration: .*:endless has no length and gave more than 20 batches, "
                                          r"so it may never end; .*data\.num_batches"):
        batches.require_end(20)
    Batches(f"{project.module}:endless", "data.calibration", 30).require_end(20)
    Batches(f"{project.module}:calibration", "data.calibration").require_end(1)
    Batches(f"{project.module}:evaluation", "data.calibration").require_end(2)


def test_what_has_a_number_of_batches_is_not_read_to_find_its_end(project):
    (project.folder / f"{project.module}_unread.py").write_text(COUNTED)
    Batches(f"{project.module}_unread:batches", "data.calibration", 3).require_end(1)
    assert importlib.import_module(f"{project.module}_unread").taken == []
