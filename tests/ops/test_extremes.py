"""The op as it runs here, its reference, and the Triton kernel by itself, on a GPU or in Triton's interpreter."""

import pytest
import torch

from qtk.errors import SpecError
from qtk.numerics import extremes as reference
from qtk.numerics.blocks import flat_sizes, split_sizes
from qtk.numerics.statistics import count_scales
from qtk.ops import extremes
from tests.kernels import conformance

kernels = pytest.importorskip("qtk.kernels.gpu.extremes")
recorded = pytest.importorskip("tests.kernels.gpu.launches").recorded
# of Triton's interpreter
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = -1e30


def in_triton(x, block_size, bound, least, *state):
    on_device = [tensor.to(DEVICE) for tensor in state]
    kernels.add_extremes_(x.to(DEVICE), block_size, bound, least, *on_device)
    for tensor, result in zip(state, on_device, strict=True):
        tensor.copy_(result)


BACKENDS = {"op": extremes.add_extremes_, "reference": reference.add_extremes_, "triton": in_triton}
CASES = {name: case for name, case in conformance.SHAPES.items() if 0 not in case[0]}


def empty(scales):
    return torch.full((scales,), torch.inf), torch.full((scales,), -torch.inf), torch.zeros(3, dtype=torch.int64)


def after(add, tensors, block_size, least=0):
    state = empty(count_scales(tensors[0].shape, block_size))
    for x in tensors:
        add(x, block_size, BOUND, least, *state)
    return [tensor.tolist() for tensor in state]


def by_loop(tensors, block_size):
    """The ends of each scale and the counts, an element at a time, in float64."""
    owners = conformance.owners(tensors[0].shape, block_size).reshape(-1).tolist()
    low, high = [torch.inf] * (max(owners) + 1), [-torch.inf] * (max(owners) + 1)
    counted = sentinels = 0
    for x in tensors:
        for owner, value in zip(owners, x.double().reshape(-1).tolist(), strict=True):
            if value <= BOUND:
                sentinels += 1
                continue
            counted += 1
            low[owner], high[owner] = min(low[owner], value), max(high[owner], value)
    return [low, high, [counted, sentinels, 0]]


@pytest.mark.pairwise(
    case=CASES, layout=conformance.LAYOUTS, kind=[*conformance.KINDS, torch.float64], backend=BACKENDS
)
def test_the_ends_of_all_tensors(case, layout, kind, backend):
    shape, block_size = CASES[case]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(kind) for _ in range(3)]
    for x in tensors[:2]:  # a sentinel in some tensors, as float16 cannot hold -1e30 but has -inf
        x.view(-1)[:: max(1, x.numel() // 5)] = -torch.inf
    found = after(BACKENDS[backend], [conformance.LAYOUTS[layout](x) for x in tensors], block_size)
    low, high, counts = by_loop(tensors, block_size)
    assert counts[1] > 0
    assert found[2] == counts
    assert found[0] == pytest.approx(low, rel=1e-6)
    assert found[1] == pytest.approx(high, rel=1e-6)


@pytest.mark.parametrize("add", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("columns", [1, 5, 64, 1000])
def test_nan_stays_and_plus_infinity_is_counted_as_broken(add, columns):
    x, after_it = torch.zeros(4, columns), torch.full((4, columns), -3.0)
    x[1, 0], x[2, columns // 2] = torch.inf, torch.nan
    for turned in (False, True):
        tensors = [each.t().contiguous() if turned else each for each in (x, after_it)]
        low, high, counts = after(add, tensors, [-1, 1] if turned else [1, -1])
        assert (low[:2], low[3], high[0], high[1], high[3]) == ([-3.0, -3.0], -3.0, 0.0, torch.inf, 0.0)
        assert low[2] != low[2]
        assert high[2] != high[2]
        assert counts == [8 * columns, 0, 1]  # of two tensors one is broken


@pytest.mark.parametrize("add", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("shape", [(9,), (70, 300), (3, 5000)])
def test_fewer_sentinels_than_make_a_mask_are_broken(add, shape):
    x = torch.ones(shape)
    x.view(-1)[:3] = BOUND
    for least, broken in ((0, 0), (3, 0), (4, 1)):
        assert after(add, [x, torch.ones(shape), x], (), least)[2] == [3 * x.numel() - 6, 6, 2 * broken]
    assert after(add, [torch.ones(shape)], (), 4)[2] == [x.numel(), 0, 0]


@pytest.mark.parametrize("add", BACKENDS.values(), ids=BACKENDS)
def test_a_scale_of_sentinels_alone_has_no_ends(add):
    x = torch.full((2, 40), -torch.inf)
    x[1] = 2.0
    low, high, _ = after(add, [x], (1, -1))
    assert (low, high) == ([torch.inf, 2.0], [-torch.inf, 2.0])


def test_what_the_kernel_counts_with_is_zero_again(monkeypatch):
    tickets = torch.zeros(4096, dtype=torch.int32)
    monkeypatch.setattr(kernels, "tickets", lambda device, count: tickets[:count])
    x = torch.randn(64, 300)
    x[3, 5:9], x[60, 1] = -torch.inf, torch.inf
    for block_size in ((), (1, -1), (-1, 1), (1, 30)):
        kernels.add_extremes_(x, block_size, BOUND, 1000, *empty(count_scales(x.shape, block_size)))
        assert not tickets.any()


def test_nothing_has_no_ends():
    with pytest.raises(SpecError, match="no extremes"):
        kernels.add_extremes_(torch.zeros(0, 3), (), BOUND, 0, *empty(1))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_a_bound_is_rounded_to_the_kind_of_the_tensor(kind):
    """As torch compares; the numbers around it."""
    bound = max(BOUND, torch.finfo(kind).min)
    near = torch.tensor([bound], dtype=kind)
    steps = near.view(torch.int16 if kind.itemsize == 2 else torch.int32) + torch.arange(-2, 3).to(
        torch.int16 if kind.itemsize == 2 else torch.int32)
    x = steps.view(kind)
    expected, found = empty(1), empty(1)
    reference.add_extremes_(x, (), bound, 0, *expected)
    in_triton(x, (), bound, 0, *found)
    assert expected[2].tolist() == found[2].tolist()
    assert int(expected[2][1]) == int((x <= bound).sum())


def test_opcheck():
    torch.library.opcheck(
        torch.ops.qtk.add_extremes_.default, (torch.randn(3, 4), [1, -1], BOUND, 0, *empty(3)),
        test_utils=("test_schema", "test_faketensor"),
    )


def many_in_triton(xs, block_sizes, bounds, leasts, *states):
    on_device = [[tensor.to(DEVICE) for tensor in column] for column in states]
    kernels.add_extremes_many_([x.to(DEVICE) for x in xs], block_sizes, bounds, leasts, *on_device)
    for column, results in zip(states, on_device, strict=True):
        for tensor, result in zip(column, results, strict=True):
            tensor.copy_(result)


def many_weights(kind):
    """Tensors of many granularities; some hold sentinels, NaN or +inf."""
    xs = []
    for seed, (shape, _) in enumerate(CASES.values()):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kind)
        places = {1: -torch.inf, 2: torch.nan, 3: torch.inf}
        if seed % 4 in places:
            x.view(-1)[x.numel() // 2] = places[seed % 4]
        xs.append(x)
    return xs, [block_size for _, block_size in CASES.values()], [seed % 3 for seed in range(len(CASES))]


@pytest.mark.parametrize("add", [extremes.add_extremes_many_, many_in_triton], ids=["op", "triton"])
@pytest.mark.parametrize("kind", conformance.KINDS, ids=str)
def test_many_tensors_are_as_each_alone(add, kind):
    xs, block_sizes, leasts = many_weights(kind)
    scales = [count_scales(x.shape, block_size) for x, block_size in zip(xs, block_sizes, strict=True)]
    found, expected = [empty(count) for count in scales], [empty(count) for count in scales]
    for _ in range(2):  # the second time on top of the first
        add(xs, block_sizes, [BOUND] * len(xs), leasts, *map(list, zip(*found, strict=True)))
        for x, block_size, least, state in zip(xs, block_sizes, leasts, expected, strict=True):
            reference.add_extremes_(x, block_size, BOUND, least, *state)
    for name, own, other in zip(CASES, found, expected, strict=True):
        for part, same in zip(own, other, strict=True):
            torch.testing.assert_close(part, same, rtol=0, atol=0, equal_nan=True, msg=name)
    assert sum(int(state[2][2]) for state in found) > 4


def test_weights_that_are_alike_share_a_launch(monkeypatch):
    launched = recorded(monkeypatch, kernels)
    xs = [torch.randn(rows, width, device=DEVICE) for rows, width in ((5, 16), (64, 144), (8, 768), (3, 3072))]
    states = [[tensor.to(DEVICE) for tensor in empty(len(x))] for x in xs]
    kernels.add_extremes_many_(xs, [(1, -1)] * 4, [BOUND] * 4, [0] * 4, *map(list, zip(*states, strict=True)))
    assert launched == ["many_extremes_kernel"]
    assert all(torch.equal(low, x.amin(1)) for x, (low, _, _) in zip(xs, states, strict=True))


def test_opcheck_of_many():
    xs, block_sizes, leasts = many_weights(torch.float32)
    states = [empty(count_scales(x.shape, block_size)) for x, block_size in zip(xs, block_sizes, strict=True)]
    sizes = flat_sizes(xs, block_sizes)
    assert [list(each) for each in split_sizes(xs, sizes)] == [
        [] if all(size == -1 for size in each) else list(each) for each in block_sizes]
    torch.library.opcheck(
        torch.ops.qtk.add_extremes_many_.default,
        (xs, sizes, [BOUND] * len(xs), leasts, *map(list, zip(*states, strict=True))),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_each_tensor_of_a_launch_has_counters_of_its_own(monkeypatch):
    """The interpreter runs one program after the other, and would not see that they meet."""
    tables = []
    upload = kernels.uploaded
    monkeypatch.setattr(kernels, "uploaded", lambda jobs: tables.append(upload(jobs)) or tables[-1])
    xs = [torch.randn(rows, 400, device=DEVICE) for rows in (300, 4, 90)]
    states = [[tensor.to(DEVICE) for tensor in empty(len(x))] for x in xs]
    kernels.add_extremes_many_(xs, [(1, -1)] * 3, [BOUND] * 3, [0] * 3, *map(list, zip(*states, strict=True)))
    (made,) = tables
    ends = [0]
    for row in made.rows.tolist():
        groups = row[kernels.PROGRAMS.value] // row[kernels.SPLITS.value]
        assert row[kernels.TICKETS.value] >= ends[-1]
        ends.append(row[kernels.TICKETS.value] + groups + kernels.COUNTERS)
    assert made.tickets >= ends[-1]
