"""The Triton kernels, checked as ``conformance`` says: compiled on a GPU, else in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qtk.errors import SpecError
from tests.kernels import conformance

kernels = pytest.importorskip("qtk.kernels.gpu.fake_quantize")
launch = pytest.importorskip("qtk.kernels.gpu.launch")
pytestmark = [
    pytest.mark.kernels(canary=True),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # of the interpreter
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(function):
    def call(*given):
        moved = [value.to(DEVICE) if isinstance(value, torch.Tensor) else value for value in given]
        result = function(*moved)
        return result.cpu() if isinstance(result, torch.Tensor) else tuple(part.cpu() for part in result)

    return call


forward = on_device(kernels.fake_quantize)
backward = on_device(kernels.fake_quantize_backward)


class TestTriton(conformance.Conformance):
    forward = staticmethod(forward)
    backward = staticmethod(backward)


class TestResidual(conformance.ResidualConformance):
    with_residual = staticmethod(on_device(kernels.fake_quantize_with_residual))
    residual_backward = staticmethod(on_device(kernels.fake_quantize_residual_backward))


def test_blocks_along_three_axes_are_left_to_the_reference():
    scale, zero = conformance.ranges((4, 6, 8), (2, 3, 4), torch.float32, -8, 7)
    x = torch.randn(4, 6, 8)
    conformance.check_forward(forward, x, scale, zero, ((2, 3, 4), -8, 7))
    conformance.check_backward(backward, torch.randn(4, 6, 8), x, scale, zero, ((2, 3, 4), -8, 7))


@pytest.mark.parametrize(("scales", "zero_points"), [(3, 4), (4, 1)])
def test_ranges_that_do_not_fit_are_refused(scales, zero_points):
    x, scale, zero = torch.randn(4, 6), torch.ones(scales), torch.zeros(zero_points)
    with pytest.raises(SpecError, match="does not fit"):
        forward(x, scale, zero, (1, -1), -8, 7)
    with pytest.raises(SpecError, match="does not fit"):
        backward(x, x, scale, zero, (1, -1), -8, 7, True, True)


@pytest.mark.kernels
@pytest.mark.medium
@pytest.mark.parametrize("case", ["tensor_large", "channel_first", "channel_last_wide", "block_tiles"])
def test_the_sums_are_the_same_each_time_and_the_tickets_are_given_back(case):
    shape, block_size = conformance.SHAPES[case]
    shape = (shape[0] * 12, *shape[1:])
    scale, zero = conformance.ranges(shape, block_size, torch.float32, -8, 7)
    x, grad = conformance.values(shape, scale, torch.float32).nan_to_num(), torch.randn(shape)
    first, second = (backward(grad, x, scale, zero, block_size, -8, 7, True, True) for _ in range(2))
    assert all(torch.equal(own, same) for own, same in zip(first, second, strict=True))
    assert not launch.tickets(torch.device(DEVICE), 1).any()


def test_every_gradient_that_is_written_was_asked_for():
    x, scale, zero = torch.randn(5, 7), torch.ones(5), torch.zeros(5)
    for wants in ((False, False), (True, False), (True, True)):
        _, of_scale, of_zero = backward(x, x, scale, zero, [1, -1], -8, 7, *wants)
        assert (of_scale.numel() > 0, of_zero.numel() > 0) == wants


@pytest.mark.kernels
@pytest.mark.parametrize("matrix", ["pairwise", pytest.param("full", marks=pytest.mark.slow)])
def test_every_kernel_compiles_for_gpus_that_are_not_here(matrix):
    """The interpreter takes more than the compiler does."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[3])}
    script = Path(__file__).with_name("compile_for_gpus.py")
    command = [sys.executable, script, matrix]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "cuda" in run.stdout
    assert "hip" in run.stdout
