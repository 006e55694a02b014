import pytest
import torch

from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.errors import CalibrationError, SpecError
from qtk.observers import min_max
from qtk.observers.extremes import extremes, sentinel_bound, with_infinite_mask

LAYOUTS = [
    (PerTensor(), (3, 5)), (PerTensor(), ()), (PerTensor(), (1023,)), (PerChannel(0), (7, 13)),
    (PerChannel(-1), (2, 3, 5)), (PerChannel(1), (2, 3, 4, 5)), (PerChannel(0), (6,)), (PerBlock((1, 4)), (3, 8)),
    (PerBlock((2, -1)), (6, 11)), (PerBlock((1, 2, -1, 1)), (2, 4, 3, 5)), (PerBlock((1, 1)), (2, 3)),
]


def by_loop(x, granularity):
    """Lists of the values each scale gets, collected one element at a time."""
    found = {}
    for index in torch.cartesian_prod(*map(torch.arange, x.shape)).reshape(-1, x.ndim).tolist() if x.ndim else [[]]:
        match granularity:
            case PerTensor():
                owner = (0,)
            case PerChannel(axis):
                owner = (index[axis % x.ndim],)
            case PerBlock(sizes):
                owner = tuple(0 if size == -1 else i // size for i, size in zip(index, sizes, strict=True))
        found.setdefault(owner, []).append(float(x[tuple(index)]))
    return found


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("granularity", "shape"), LAYOUTS, ids=str)
def test_each_scale_gets_the_extremes_of_its_elements(granularity, shape, kind):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kind)
    found = extremes(x, granularity)
    assert found.low.dtype == found.high.dtype == torch.float32
    assert tuple(found.low.shape) == tuple(found.high.shape) == granularity.qparam_shape(shape)
    for owner, values in by_loop(x.float(), granularity).items():
        assert (float(found.low[owner]), float(found.high[owner])) == (min(values), max(values))
    assert (found.count, found.sentinels, found.seen) == (x.numel(), 0, None)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last), torch.randn(4, 6).t(), torch.randn(4, 6)[:, ::2],
        torch.randn(4, 1).expand(4, 3),
    ],
    ids=["channels_last", "transposed", "strided", "expanded"],
)
def test_any_layout(x):
    found = extremes(x, PerTensor())
    assert (found.low.item(), found.high.item()) == (x.min().item(), x.max().item())


@pytest.mark.parametrize(
    ("kind", "mark"),
    [
        (torch.float32, -torch.inf), (torch.float32, torch.finfo(torch.float32).min), (torch.float32, -1e30),
        (torch.float16, -torch.inf), (torch.float16, torch.finfo(torch.float16).min),
        (torch.bfloat16, torch.finfo(torch.bfloat16).min), (torch.bfloat16, -2e30),
        (torch.float64, torch.finfo(torch.float32).min),
    ],
)
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerBlock((1, 2))], ids=str)
def test_mask_sentinels_are_left_out_and_counted(kind, mark, granularity):
    x = torch.tensor([[1.0, -2.0, 3.0, 5.0], [0.5, 0.25, 7.0, -8.0]], dtype=kind)
    x[0, 1] = mark
    found = extremes(x, granularity)
    for owner, values in by_loop(x, granularity).items():
        kept = [value for value in values if value in (1, 3, 5, 0.5, 0.25, 7, -8)]
        assert (float(found.low[owner]), float(found.high[owner])) == (min(kept), max(kept))
    assert (found.count, found.sentinels, found.seen) == (7, 1, None)


def test_the_largest_measurements_are_no_marks():
    assert extremes(torch.tensor([-9e29, -65504.0]), PerTensor()).sentinels == 0
    assert extremes(torch.tensor([-65472.0], dtype=torch.float16), PerTensor()).sentinels == 0
    assert sentinel_bound(torch.bfloat16) == -1e30


def test_a_scale_whose_elements_are_all_marks_says_so():
    x = torch.tensor([[1.0, 2.0], [-torch.inf, -torch.inf]])
    found = extremes(x, PerChannel(0))
    assert found.seen.tolist() == [True, False]
    assert (found.count, found.sentinels) == (2, 2)
    assert extremes(torch.full((3,), -torch.inf), PerTensor()).count == 0


def test_nothing_in_nothing_out():
    assert extremes(torch.empty(0, 4), PerChannel(1)) is None


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerChannel(1)], ids=str)
@pytest.mark.parametrize(
    ("value", "said"), [(torch.nan, "1 NaN"), (torch.inf, "1 +inf")], ids=["nan", "inf"]
)
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_broken_is_said(granularity, value, said, masked):
    x = torch.randn(3, 4)
    x[1, 2] = value
    if masked:
        x[0, 0] = -torch.inf
    with pytest.raises(CalibrationError) as caught:
        extremes(x, granularity)
    assert said in str(caught.value)
    assert "(3, 4)" in str(caught.value)


def test_blocks_that_do_not_divide_are_refused():
    with pytest.raises(SpecError, match="does not divide"):
        extremes(torch.zeros(2, 7), PerBlock((1, 4)))


SCORES = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 10
PADDED = torch.arange(64).expand(8, 64) >= 56


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("masked", [
    SCORES.masked_fill(PADDED, -1e4), SCORES - 1e4 * PADDED, SCORES - 2e4 * PADDED - 1e4 * (PADDED & (SCORES > 0)),
    (SCORES - 1e4 * PADDED) / 4,
], ids=["filled", "added", "two masks", "scaled"])
def test_finite_numbers_of_a_mask_are_found(masked, kind):
    x = masked.to(kind)
    assert torch.equal(with_infinite_mask(x), x.masked_fill(PADDED, -torch.inf))
    for found in (extremes(x, PerTensor(), finds_mask=True), extremes(x[~PADDED], PerTensor())):
        assert (found.low, found.high) == (x[~PADDED].amin().float(), x[~PADDED].amax().float())
    assert extremes(x, PerTensor(), finds_mask=True).sentinels == int(PADDED.sum())
    assert extremes(x, PerTensor()).sentinels == 0


@pytest.mark.parametrize("x", [
    SCORES, SCORES * 300, torch.linspace(-1e4, 10, 1000), SCORES.masked_fill(PADDED, -100.0),
    torch.zeros(8, 64).masked_fill(PADDED, -1e4), torch.full((8, 64), -1e4),
    torch.where(torch.arange(4096) == 7, -5e3, torch.linspace(-3, 3, 4096)), SCORES.masked_fill(PADDED, torch.nan),
    torch.cat([SCORES.masked_fill(PADDED, -1e4), torch.full((1, 64), 2e3)]), torch.empty(0),
], ids=["scores", "large scores", "evenly", "above the bound", "the mask itself", "one number",
        "a large activation", "NaN", "as far above", "nothing"])
def test_numbers_that_are_no_mask_stay(x):
    assert with_infinite_mask(x) is x or torch.equal(with_infinite_mask(x).nan_to_num(), x.nan_to_num())


def test_an_observer_on_an_accelerator_finds_the_mask_too(monkeypatch):
    monkeypatch.setattr(min_max, "on_cpu", lambda x: False)
    observer = min_max.MinMax(PerTensor())
    observer.finds_mask = True
    observer.observe(SCORES.masked_fill(PADDED, -1e4))
    assert observer.sentinels == int(PADDED.sum())
    assert float(observer.minimum) == float(SCORES[~PADDED].amin())
