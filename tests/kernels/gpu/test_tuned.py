"""Tiles chosen by timing give the same bits; in Triton's interpreter, or on a GPU."""

import pytest
import torch

from tests.kernels import conformance
from tests.kernels.gpu import test_fake_quantize as gpu

tuned = pytest.importorskip("qtk.kernels.gpu.tuned")
dynamic = pytest.importorskip("qtk.kernels.gpu.fake_quantize_dynamic")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:(overflow|divide|invalid):RuntimeWarning"),  # of the interpreter
]
DEVICE = gpu.DEVICE
CASES = {name: case for name, case in conformance.SHAPES.items() if 0 not in case[0]}


class Timing:
    """In place of Triton's benchmark: runs a candidate, and says that the one at ``best`` is the fastest."""

    def __init__(self, best):
        self.best, self.calls = best, 0

    def __call__(self, run, quantiles):
        run()
        self.calls += 1
        seconds = 1.0 if (self.calls - 1) == self.best else 2.0
        return [seconds] * 3


@pytest.fixture
def tuning(monkeypatch):
    """A function that switches tuning on, with the candidate that wins; what an earlier run found is not read."""
    make = tuned.with_fastest_tile.__wrapped__
    autotune = tuned.triton.autotune
    monkeypatch.setattr(
        tuned.triton, "autotune", lambda *given, **options: autotune(*given, **{**options, "cache_results": False}))

    def switch_on(best):
        timing, made = Timing(best), {}
        monkeypatch.setattr(tuned, "tunes", lambda device: True)
        monkeypatch.setattr(
            tuned, "with_fastest_tile", lambda kernel: made.setdefault(id(kernel), make(kernel, timing)))
        timing.made = made
        return timing

    return switch_on


@pytest.mark.medium
@pytest.mark.parametrize("best", [0, 3, 5])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_tile_gives_the_same_bits(case, best, tuning):
    shape, block_size = case
    for zero_point in (None, torch.int32):
        scale, zero = conformance.ranges(shape, block_size, zero_point, -8, 7)
        x = conformance.values(shape, scale, torch.float32).nan_to_num()
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        x, scale, zero, grad = (None if each is None else each.to(DEVICE) for each in (x, scale, zero, grad))
        given = x, scale, zero, block_size, -8, 7
        expected = gpu.forward(*given), gpu.backward(grad, *given, False, False)[0]
        ranges = dynamic.fake_quantize_dynamic(x, block_size, 0, 255, False)
        tuning(best)
        assert conformance.same_bits(gpu.forward(*given), expected[0])
        assert conformance.same_bits(gpu.backward(grad, *given, False, False)[0], expected[1])
        for own, other in zip(dynamic.fake_quantize_dynamic(x, block_size, 0, 255, False), ranges, strict=True):
            assert conformance.same_bits(own, other)


@pytest.mark.medium
def test_a_shape_is_timed_once_and_the_fastest_is_kept(tuning):
    timing = tuning(3)
    x, other, scale = (each.to(DEVICE) for each in (torch.randn(64, 256), torch.randn(64, 512), torch.ones(64)))
    for _ in range(3):
        gpu.forward(x, scale, None, (1, -1), -8, 7)
    first = timing.calls
    assert first == len(tuned.candidates([], {"s2": 64, "middle": 1, "inner": 256, "COLUMNS": False,
                                             "SHIFT": 0})) > 3
    (autotuner,) = timing.made.values()
    assert autotuner.best_config == list(autotuner.configs_timings)[3]
    gpu.forward(other, scale, None, (1, -1), -8, 7)
    assert timing.calls > first
    second = timing.calls
    gpu.forward(x.bfloat16(), scale, None, (1, -1), -8, 7)  # another dtype
    assert timing.calls > second


def test_what_is_summed_is_not_tuned(tuning):
    timing = tuning(0)
    grad, x, scale = (each.to(DEVICE) for each in (torch.ones(8, 32), torch.randn(8, 32), torch.ones(8)))
    gpu.backward(grad, x, scale, None, (1, -1), -8, 7, True, False)
    assert timing.calls == 0


@pytest.mark.parametrize(("s2", "middle", "inner", "columns"), [
    (1, 1, 1 << 20, False), (768, 1, 768, False), (64, 1, 27, False), (512, 4096, 1, True), (3, 1, 1, True),
])
def test_candidates_are_powers_of_two_of_a_few_sizes(s2, middle, inner, columns):
    found = tuned.candidates([], {"s2": s2, "middle": middle, "inner": inner, "COLUMNS": columns, "SHIFT": 0})
    tiles = {(config.kwargs["SCALES"], config.kwargs["REACH"], config.num_warps) for config in found}
    assert len(tiles) == len(found) <= 6
    for scales, reach, _ in tiles:
        assert scales & (scales - 1) == reach & (reach - 1) == 0
        assert scales * reach <= max(tuned.TILES)
