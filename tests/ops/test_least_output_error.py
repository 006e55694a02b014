"""The C++ kernel, and the reference where there is none, against float64 element by element."""

import pytest
import torch

from qtk.ops import least_output_error as op


def errors(rows, scales, zeros, mean, gain):
    """float64 [candidates, scales]; codes by float32 division, as everywhere."""
    x, zero = rows.float(), 0.0 if zeros is None else zeros[..., None].float()
    codes = ((x / scales[..., None]).round() + zero).clamp(-8, 7)
    change = x - (codes - zero) * scales[..., None]
    d, w = change.double(), x.double()
    return (d**2).sum(-1) + mean * d.sum(-1) ** 2 / w.shape[-1] + gain * (d * w).sum(-1) ** 2 / (w**2).sum(-1)


@pytest.mark.parametrize(("count", "kind"), [(1, torch.float32), (7, torch.float32), (128, torch.bfloat16),
                                             (1031, torch.float16), (130, torch.float64)], ids=str)
@pytest.mark.parametrize(("candidates", "asymmetric"), [(9, False), (9, True), (16, True), (37, False)])
def test_no_candidate_has_a_smaller_error(count, kind, candidates, asymmetric):
    generator = torch.Generator().manual_seed(count)
    rows = (torch.randn(41, count, generator=generator) * torch.logspace(-9, 9, 41)[:, None]).clamp(-3e4, 3e4).to(kind)
    scales = rows.float().abs().amax(1).clamp(min=1e-12) / 7 * torch.linspace(1, 0.5, candidates)[:, None]
    zeros = torch.randint(-8, 8, scales.shape, generator=generator).int() if asymmetric else None
    expected = errors(rows, scales, zeros, 2.0, 6.0)
    found = op.least_output_error(rows, scales, zeros, -8, 7, mean=2.0, gain=6.0)
    assert found.dtype == torch.int64
    chosen, least = expected.gather(0, found[None])[0], expected.amin(0)
    assert bool(((chosen <= least * (1 + 1e-6)) | least.isnan()).all())
    assert len(found.unique()) > 1 or count == 1


def test_ties_take_the_first_and_rows_of_zeros_too():
    rows = torch.cat([torch.zeros(3, 32), torch.randn(2, 32)])
    scales = torch.full((5, 5), 0.25)
    assert op.least_output_error(rows, scales, None, -8, 7, mean=1.0, gain=1.0).tolist() == [0] * 5
    assert op.least_output_error(rows[:0], scales[:, :0], None, -8, 7, mean=1.0, gain=1.0).tolist() == []


def test_the_reference_and_counts_choose_alike():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 128, generator=generator).bfloat16()
    scales = rows.float().abs().amax(1) / 7 * torch.linspace(1, 0.55, 16)[:, None]
    found = op.least_output_error(rows, scales, None, -8, 7, mean=2.0, gain=6.0)
    assert torch.equal(found, op._reference(rows, scales, None, -8, 7, 2.0, 6.0))
    twice = op.least_output_error(rows, scales, None, -8, 7, mean=2.0, gain=6.0,
                                  counts=torch.full(rows.shape, 2, dtype=torch.int64))
    assert torch.equal(found, twice)


def test_many_rows_do_not_depend_on_the_number_of_threads():
    rows, threads = torch.randn(2000, 64), torch.get_num_threads()
    scales = rows.abs().amax(1) / 7 * torch.linspace(1, 0.6, 4)[:, None]
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(op.least_output_error(rows, scales, None, -8, 7, mean=2.0, gain=6.0))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
