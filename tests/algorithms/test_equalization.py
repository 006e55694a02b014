"""The factors of cross-layer equalization, against closed forms and against ranges computed from scaled weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qtk.algorithms.equalization import BOUND, LayerMagnitudes, absorbed_bias, equalize

NONE = torch.tensor([[-1]])


def rows(channels: Tensor) -> Tensor:
    return channels[:, None]


def columns(channels: Tensor) -> Tensor:
    return channels[None]


def weight(out: int, into: int, seed: int = 0) -> Tensor:
    """A weight with rows and columns of very unequal ranges."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(out, into, generator=generator, dtype=torch.float64)
    shapes = ((out, 1), (1, into))
    spread = [torch.exp2(torch.randn(shape, generator=generator, dtype=torch.float64) * 3) for shape in shapes]
    return drawn * spread[0] * spread[1]


def test_two_layers_have_the_closed_form() -> None:
    first, second, channels = weight(6, 4), weight(3, 6, 1), torch.arange(6)
    result = equalize(
        [LayerMagnitudes(first.abs(), rows(channels), NONE), LayerMagnitudes(second.abs(), NONE, columns(channels))],
        [channels],
    )
    r1, r2 = first.abs().amax(1), second.abs().amax(0)
    torch.testing.assert_close(result.factors, (r1 * r2).sqrt() / r1, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.before, r1 / r2, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.after, torch.ones(6, dtype=torch.float64))
    assert result.num_sweeps <= 4


def test_a_depthwise_triple_has_the_cube_root() -> None:
    """AIMET: W1 / s12, W2 · s12 / s23, W3 · s23 with s12 = r1 / ∛(r1 r2 r3) and s23 = ∛(r1 r2 r3) / r3."""
    first, depthwise, last = weight(5, 4), weight(5, 1, 1), weight(3, 5, 2)
    before, behind = torch.arange(5), torch.arange(5, 10)
    result = equalize(
        [
            LayerMagnitudes(first.abs(), rows(before), NONE),
            LayerMagnitudes(depthwise.abs(), rows(behind), rows(before)),
            LayerMagnitudes(last.abs(), NONE, columns(behind)),
        ],
        [before, behind], tolerance=1e-11,
    )
    r1, r2, r3 = first.abs().amax(1), depthwise.abs().amax(1), last.abs().amax(0)
    cube_root = (r1 * r2 * r3) ** (1 / 3)
    torch.testing.assert_close(1 / result.factors[before], r1 / cube_root, rtol=1e-9, atol=0)
    torch.testing.assert_close(1 / result.factors[behind], cube_root / r3, rtol=1e-9, atol=0)


def test_several_producers_and_consumers_share_one_range() -> None:
    a, b, c, d = weight(4, 3), weight(4, 2, 1), weight(2, 4, 2), weight(5, 4, 3)
    channels = torch.arange(4)
    result = equalize(
        [
            LayerMagnitudes(a.abs(), rows(channels), NONE), LayerMagnitudes(b.abs(), rows(channels), NONE),
            LayerMagnitudes(c.abs(), NONE, columns(channels)), LayerMagnitudes(d.abs(), NONE, columns(channels)),
        ],
        [channels],
    )
    r1 = torch.cat([a, b], 1).abs().amax(1)
    r2 = torch.cat([c, d], 0).abs().amax(0)
    torch.testing.assert_close(result.factors, (r2 / r1).sqrt(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_a_residual_region_converges(seed: int) -> None:
    """x = stem; x = x + second(first(x)); x = x + direct(x); head(x): all that touch x share its channels."""
    stem, first, second, direct, head = (
        weight(*shape, seed * 10 + index) for index, shape in enumerate([(4, 3), (6, 4), (4, 6), (4, 4), (2, 4)])
    )
    x, inside = torch.arange(4), torch.arange(4, 10)
    result = equalize(
        [
            LayerMagnitudes(stem.abs(), rows(x), NONE),
            LayerMagnitudes(first.abs(), rows(inside), columns(x)),
            LayerMagnitudes(second.abs(), rows(x), columns(inside)),
            LayerMagnitudes(direct.abs(), rows(x), columns(x)),
            LayerMagnitudes(head.abs(), NONE, columns(x)),
        ],
        [x, inside],
    )
    f, g = result.factors[x], result.factors[inside]
    direct = direct * f[:, None] / f
    direct.fill_diagonal_(0)  # there a factor cancels
    stem, first = stem * f[:, None], first * g[:, None] / f
    second, head = second * f[:, None] / g, head / f
    produced = torch.cat([stem, second, direct], 1).abs().amax(1)
    read = torch.cat([first, direct, head], 0).abs().amax(0)
    torch.testing.assert_close(produced / read, torch.ones(4, dtype=torch.float64), rtol=0.01, atol=0)
    inner = first.abs().amax(1) / second.abs().amax(0)
    torch.testing.assert_close(inner, torch.ones(6, dtype=torch.float64), rtol=0.01, atol=0)
    torch.testing.assert_close(produced / read, result.after[x])


def test_dead_channels_keep_their_factor() -> None:
    first, second, channels = weight(4, 3), weight(2, 4, 1), torch.arange(4)
    first[1], second[:, 2] = 0, 0
    result = equalize(
        [LayerMagnitudes(first.abs(), rows(channels), NONE), LayerMagnitudes(second.abs(), NONE, columns(channels))],
        [channels],
    )
    assert result.factors[1:3].tolist() == [1.0, 1.0]
    assert result.before[1:3].tolist() == [1.0, 1.0]
    assert not bool((result.factors[[0, 3]] == 1).any())


def test_factors_stay_within_bounds() -> None:
    first, second = torch.tensor([[1e-20], [1e20]]).double(), torch.tensor([[1e20, 1e-20]]).double()
    result = equalize(
        [
            LayerMagnitudes(first, rows(torch.arange(2)), NONE),
            LayerMagnitudes(second, NONE, columns(torch.arange(2))),
        ],
        [torch.arange(2)],
    )
    assert result.factors.tolist() == pytest.approx([BOUND, 1 / BOUND])


def test_nothing_to_equalize() -> None:
    result = equalize([LayerMagnitudes(weight(2, 2).abs(), NONE, NONE)], [])
    assert result.factors.numel() == 0


def test_the_absorbed_bias_is_what_hardly_ever_is_below() -> None:
    mean, std = torch.tensor([4.0, 4.0, -2.0]), torch.tensor([1.0, 2.0, 0.1])
    inf = torch.full((3,), torch.inf)
    assert absorbed_bias(mean, std, inf).tolist() == [1.0, 0.0, 0.0]
    assert absorbed_bias(mean, std, torch.tensor([0.25, 1.0, 1.0])).tolist() == [0.25, 0.0, 0.0]
    assert absorbed_bias(mean, std, -inf).tolist() == [0.0, 0.0, 0.0]
