import itertools

import pytest
import torch

from qtk.numerics.token_layout import Count, Factor, TokenLayout

SAMPLES, TOKENS, CHANNELS = 2, 3, 8
VALID = torch.tensor([[True, True, False], [False, True, True]])


def numbered():
    """Every element tells its sample and token."""
    sample, token = torch.arange(SAMPLES)[:, None, None], torch.arange(TOKENS)[:, None]
    return (100 * sample + 10 * token + torch.zeros(CHANNELS)).long()


LAYOUT = TokenLayout.of_shape((SAMPLES, TOKENS, CHANNELS))


def permuted(layout, order):
    return TokenLayout(tuple(layout.axes[axis] for axis in order))


def chosen(value, layout):
    """The samples and tokens in the rows of a value, with how often each occurs."""
    rows = layout.rows(value, VALID)
    assert rows.ndim == value.ndim
    found, counts = rows.unique(return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


EXPECTED = {0: CHANNELS, 10: CHANNELS, 110: CHANNELS, 120: CHANNELS}


@pytest.mark.parametrize("shape", [
    (2, 3, 8), (6, 8), (2, 3, 2, 4), (6, 2, 4), (1, 2, 3, 8), (2, 1, 3, 8), (2, 24), (48,), (2, 3, 8, 1), (1, 6, 1, 8),
    (12, 4), (1, 48),
])
def test_rows_are_found_behind_a_reshape(shape):
    layout = LAYOUT.reshaped(shape)
    assert layout.lengths() == shape
    assert chosen(numbered().reshape(shape), layout) == EXPECTED


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_rows_are_found_behind_heads_and_permutations_and_folded_axes(order):
    value, layout = numbered().reshape(2, 3, 4, 2).permute(order), permuted(LAYOUT.reshaped((2, 3, 4, 2)), order)
    assert chosen(value, layout) == EXPECTED
    folded = (value.shape[0] * value.shape[1], *value.shape[2:])
    assert chosen(value.reshape(folded), layout.reshaped(folded)) == EXPECTED
    back = layout.reshaped(folded).reshaped(value.shape)
    assert chosen(value, back) == EXPECTED


@pytest.mark.parametrize("shape", [(3, 2, 8), (4, 12), (16, 3)])
def test_what_cuts_the_rows_is_not_followed(shape):
    assert LAYOUT.reshaped(shape) is None


def test_channels_stay_on_their_axis():
    value = torch.arange(SAMPLES * TOKENS * 4).reshape(SAMPLES, TOKENS, 4).movedim(2, 1)  # [samples, channels, tokens]
    rows = permuted(TokenLayout.of_shape((SAMPLES, TOKENS, 4)), (0, 2, 1)).rows(value, VALID)
    expected = torch.stack([value[0, :, 0], value[0, :, 1], value[1, :, 1], value[1, :, 2]])
    assert torch.equal(rows, expected[..., None])


def test_other_lengths_than_at_capture():
    layout = TokenLayout.of_shape((2, 3, 8), (False, False, True))
    valid = torch.tensor([[True] * 4 + [False]] * 3)
    assert layout.rows(torch.randn(3, 5, 8), valid).shape == (12, 1, 8)
    assert layout.rows(torch.randn(3, 4, 8), valid) is None
    assert layout.rows(torch.randn(3, 5, 9), valid) is None
    two_unknown = TokenLayout(((Factor(Count.SAMPLES, 2), Factor(Count.OTHER, 2, False), Factor(Count.OTHER, 2, False)),
                               (Factor(Count.TOKENS, 3),)))
    assert two_unknown.rows(torch.randn(12, 5), valid) is None


def test_no_valid_token():
    assert LAYOUT.rows(numbered(), torch.zeros(SAMPLES, TOKENS, dtype=torch.bool)).shape == (0, 1, CHANNELS)


def test_scores_count_where_query_and_key_are_valid():
    keys = (Factor(Count.KEYS, TOKENS),)
    folded = Factor(Count.SAMPLES, SAMPLES), Factor(Count.OTHER, 2)
    layout = TokenLayout((folded, (Factor(Count.TOKENS, TOKENS),), keys))
    scores = torch.arange(SAMPLES * 2 * TOKENS * TOKENS).reshape(SAMPLES * 2, TOKENS, TOKENS)
    expected = [
        int(scores[sample * 2 + head, query, key]) for sample in range(SAMPLES) for head in range(2)
        for query in range(TOKENS) for key in range(TOKENS) if VALID[sample, query] and VALID[sample, key]
    ]
    rows = layout.rows(scores, VALID)
    assert rows.shape == (len(expected), 1, 1)
    assert sorted(rows.flatten().tolist()) == sorted(expected)
