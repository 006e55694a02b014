import pytest
import torch
from torch import nn

from qtk.nn.kept_buffers import buffer_places, buffers_kept


def test_buffers_are_restored_also_after_an_exception():
    norm = nn.BatchNorm1d(2)

    def fail():
        with buffers_kept(buffer_places(norm)):
            norm(torch.randn(4, 2) + 5)
            assert norm.running_mean.abs().sum() > 0
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert (norm.running_mean == 0).all()
    assert norm.num_batches_tracked == 0


def test_a_buffer_that_was_replaced_is_the_same_object_again_with_its_value():
    module = nn.Module()
    module.register_buffer("h", torch.zeros(2))
    before = module.h
    with buffers_kept([(module, "h")]):
        module.h += 1
        module.h = torch.ones(5)
    assert module.h is before
    assert (module.h == 0).all()
