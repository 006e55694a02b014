"""The C++ kernel, and the reference where there is none, against float64 element by element."""

import pytest
import torch

from qtk.calibrators.tf_enhanced import propose
from qtk.core.dtypes import dtype
from qtk.core.spec import QuantSpec
from qtk.ops import least_candidate as op


def errors(rows, scales, zeros, spec, clipped, counts=None):
    """float64 [candidates, scales], in numpy's order of sums."""
    x, scale = rows.double(), scales.double()[..., None]
    zero = 0.0 if zeros is None else zeros.double()[..., None]
    codes = (x / scale).round() + zero
    held = codes.clamp(spec.qmin, spec.qmax)
    lost = (x - (held - zero) * scale) ** 2 * torch.where(held == codes, 1.0, clipped)
    return (lost if counts is None else lost * counts.double()).sum(-1)


def values_of(kind, shape):
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(shape, generator=generator)
    return {"normal": normal, "uniform": torch.rand(shape, generator=generator) - 0.3,
            "few values": (3 * normal).round() / 3, "one far value": normal.index_fill(1, torch.tensor([0]), 40.0),
            "positive": normal.abs()}[kind]


@pytest.mark.parametrize("kind", ["normal", "uniform", "few values", "one far value", "positive"])
@pytest.mark.parametrize(("name", "symmetric"), [("int8", True), ("uint8", False), ("int4", True)])
@pytest.mark.parametrize(("clipped", "stored"), [(3.0, torch.float32), (1.0, torch.bfloat16), (0.5, torch.float64)])
def test_no_candidate_has_a_smaller_error(kind, name, symmetric, clipped, stored):
    spec = QuantSpec(dtype(name), symmetric=symmetric)
    for shape in ((37, 1), (23, 200), (2, 9001)):
        rows = values_of(kind, shape).to(stored)
        scales, zeros = propose(rows.double().amin(1), rows.double().amax(1), spec)
        expected = errors(rows, scales, zeros, spec, clipped)
        found = op.least_candidate(rows, scales, zeros, int(spec.qmin), int(spec.qmax), clipped=clipped)
        least = expected.amin(0)
        assert found.dtype == torch.int64
        assert bool((expected.gather(0, found[None])[0] <= least * (1 + 1e-12) + 1e-300).all())
        reference = op._reference(rows, scales, zeros, int(spec.qmin), int(spec.qmax), None, clipped)
        assert torch.equal(found, reference)


def test_elements_count_as_often_as_said():
    generator, spec = torch.Generator().manual_seed(1), QuantSpec(dtype("uint8"), symmetric=False)
    middles = torch.linspace(-2, 5, 2048, dtype=torch.float64).expand(6, -1)
    counts = (torch.rand(6, 2048, generator=generator) * 1e6 * torch.exp(-middles**2)).long()
    scales, zeros = propose(middles.amin(1), middles.amax(1), spec)
    expected = errors(middles, scales, zeros, spec, 3.0, counts)
    found = op.least_candidate(middles, scales, zeros, 0, 255, counts=counts, clipped=3.0)
    assert bool((expected.gather(0, found[None])[0] <= expected.amin(0) * (1 + 1e-12)).all())
    assert not torch.equal(found, op.least_candidate(middles, scales, zeros, 0, 255, clipped=3.0))


def test_ties_take_the_first_and_a_nan_wins():
    rows, scales = torch.randn(4, 96), torch.full((30, 4), 0.25)
    assert op.least_candidate(rows, scales, None, -8, 7).tolist() == [0] * 4
    assert op.least_candidate(torch.zeros(4, 96), scales, None, -8, 7, clipped=3.0).tolist() == [0] * 4
    assert op.least_candidate(rows[:0], scales[:, :0], None, -8, 7).tolist() == []
    scales[7, 2] = torch.nan
    assert op.least_candidate(rows, scales, None, -8, 7, clipped=3.0).tolist() == [0, 0, 7, 0]


def test_arguments_stay_as_they_are_and_an_infinite_scale_may_win_as_a_nan():
    scales = torch.tensor([[-1.0], [-0.5]], dtype=torch.float64)
    op.least_candidate(torch.randn(1, 9, dtype=torch.float64), scales, None, -8, 7)
    assert scales.tolist() == [[-1.0], [-0.5]]
    rows, counts = torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[2, 0, 1]])
    scales, zeros = torch.tensor([[1.0], [torch.inf]]), torch.tensor([[0], [9]], dtype=torch.int32)
    for each in (op.least_candidate, op._reference):
        assert each(rows, scales, zeros, 0, 3, counts=counts).tolist() == [1]


def test_other_norms_and_any_number_of_threads():
    rows, threads = torch.randn(3, 40_000), torch.get_num_threads()
    scales = rows.abs().amax(1) / 127 * torch.linspace(0.5, 1, 40)[:, None]
    assert not torch.equal(op.least_candidate(rows, scales, None, -128, 127, norm=1.0),
                           op.least_candidate(rows, scales, None, -128, 127, norm=8.0))
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found += [op.least_candidate(part, scales[:, : len(part)], None, -128, 127) for part in (rows, rows[:1])]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert torch.equal(found[0][:1], found[1])


@pytest.mark.parametrize("norm", [1.0, 2.0])
@pytest.mark.parametrize("name", ["int4", "int8", "uint8"])
def test_screening_by_sums_in_float32_makes_no_difference(norm, name, monkeypatch):
    generator, spec = torch.Generator().manual_seed(1), QuantSpec(dtype(name), symmetric=name != "uint8")
    rows = torch.cat([
        torch.randn(40, 64, generator=generator), torch.full((2, 64), 0.7), torch.zeros(2, 64),
        torch.randint(-3, 4, (20, 64), generator=generator) / 4])
    candidates = propose(rows.double().amin(1), rows.double().amax(1), spec)
    screened = op._reference(rows, *candidates, int(spec.qmin), int(spec.qmax), norm=norm)
    monkeypatch.setattr(op, "FEW_CODES", 0)
    assert torch.equal(screened, op._reference(rows, *candidates, int(spec.qmin), int(spec.qmax), norm=norm))
