"""Measures of outputs."""

import math
import sys

import pytest
import torch

from qtk.cli.evaluation import Evaluation, agreement, evaluation, outputs_sqnr_db, top1
from qtk.errors import ConfigError


def test_top1_counts_samples_not_batches():
    scores = torch.eye(4)
    pairs = [(scores, torch.tensor([0, 1, 2, 3])), (scores[:1], torch.tensor([2]))]
    assert top1(pairs) == 4 / 5


def test_top1_reads_the_first_tensor_of_a_nested_output():
    assert top1([({"scores": torch.eye(3), "hidden": torch.zeros(3, 9)}, torch.arange(3))]) == 1.0


@pytest.mark.parametrize("label", [torch.zeros(3), None, torch.zeros(4, 4), 1])
def test_labels_that_do_not_fit_the_scores(label):
    with pytest.raises(ConfigError, match=r"top1 needs a label for each of \(4,\) predictions"):
        top1([(torch.eye(4), label)])


def test_outputs_without_scores():
    with pytest.raises(ConfigError, match=r"the model returns a tensor of shape \(4,\)"):
        top1([(torch.zeros(4), torch.zeros(4))])


def test_agreement_is_the_share_of_equal_predictions():
    ours = [torch.eye(4), torch.eye(2)]
    theirs = [torch.eye(4)[[0, 1, 3, 2]], torch.eye(2) * 5]
    assert agreement(ours, theirs) == 4 / 6


def test_sqnr_is_over_all_batches_and_real_outputs():
    references = [(torch.tensor([3.0]), torch.tensor([7])), (torch.tensor([4.0]), torch.tensor([7]))]
    outputs = [(torch.tensor([3.0]), torch.tensor([9])), (torch.tensor([4.5]), torch.tensor([9]))]
    assert outputs_sqnr_db(references, outputs) == pytest.approx(10 * math.log10(25 / 0.25))
    assert outputs_sqnr_db(references, references) == math.inf


def test_a_users_measure_goes_by_its_name(project):
    measure = evaluation(f"{project.module}:mean_confidence")
    assert measure.name == "mean_confidence"
    assert measure([torch.zeros(2, 4)], [None]) == 0.25


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda pairs: "good", "evaluation m: returned a str; it must return a number"),
        (lambda pairs: pairs[5], "evaluation m: raised IndexError"),
        (lambda pairs: True, "returned a bool"),
        (lambda pairs: sys.exit(), r"evaluation m: called sys\.exit\(None\)"),
    ],
)
def test_a_measure_that_gives_no_number(function, said):
    with pytest.raises(ConfigError, match=said):
        Evaluation("m", function)([], [])


def test_a_scalar_tensor_is_a_number():
    assert Evaluation("m", lambda pairs: torch.tensor(2.5))([], []) == 2.5
