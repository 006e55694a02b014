"""Example inputs of a given shape."""

import pytest
import torch

from qtk.cli.example_input import example_input
from qtk.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_values_have_shape_and_dtype(dtype):
    values = example_input((4, 16), dtype)
    assert (values.shape, values.dtype, bool(values.any())) == ((4, 16), dtype, dtype.is_floating_point)


@pytest.mark.parametrize("shape", [(1, 1 << 40), (10**400,), (1 << 20, 1 << 20)])
def test_a_shape_of_no_batch_is_refused_before_memory_is_asked_for(shape):
    with pytest.raises(ConfigError, match="elements, more than 2³¹ or than there is memory for; give the shape of one"):
        example_input(shape, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_inputs_of_a_dry_run_take_no_memory(dtype):
    assert example_input((1 << 16, 1 << 15), dtype, device="meta").is_meta
