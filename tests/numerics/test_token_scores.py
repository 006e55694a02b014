"""Scores of tokens against float64, written out; chunks of any size give the same."""

import pytest
import torch

from qtk.numerics import token_scores
from qtk.numerics.token_scores import divergences, negative_log_likelihoods


def rows(seed, count=37, vocabulary=101):
    return 5 * torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed))


def probabilities(logits):
    powers = logits.double().exp()
    return powers / powers.sum(-1, keepdim=True)


@pytest.mark.parametrize("elements", [1, 500, 1 << 22])
def test_scores_are_those_of_float64(elements, monkeypatch):
    monkeypatch.setattr(token_scores, "MOST_ELEMENTS", elements)
    p, q = rows(0), rows(1)
    targets = torch.arange(37) * 2
    expected = -probabilities(p)[torch.arange(37), targets].log()
    assert (negative_log_likelihoods(p, targets) - expected).abs().max() < 1e-5
    expected = (probabilities(p) * (probabilities(p).log() - probabilities(q).log())).sum(-1)
    found = divergences(p, q)
    assert (found - expected).abs().max() < 1e-5
    assert found.min() > 1  # so that the order of the two is seen
    assert torch.equal(divergences(p, p), torch.zeros(37))


def test_small_floats_are_computed_in_float32():
    p, q = rows(0).bfloat16(), rows(1).bfloat16()
    assert torch.equal(divergences(p, q), divergences(p.float(), q.float()))
    assert negative_log_likelihoods(p, torch.zeros(37, dtype=torch.int32)).dtype is torch.float32


def test_masked_words_have_no_part():
    p, q = rows(0), rows(1)
    p[:, 50:], q[:, 50:] = -torch.inf, -torch.inf
    assert (divergences(p, q) - divergences(p[:, :50], q[:, :50])).abs().max() < 1e-5
    assert torch.isinf(divergences(rows(0), q)).all()  # what float holds possible, and the other not


def test_no_rows():
    assert negative_log_likelihoods(torch.empty(0, 5), torch.empty(0, dtype=torch.long)).shape == (0,)
    assert divergences(torch.empty(0, 5), torch.empty(0, 5)).shape == (0,)
