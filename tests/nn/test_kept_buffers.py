import pytest
import torch
from torch import nn

from qtk.nn.kept_buffers import buffers_kept


def test_buffers_are_restored_also_after_an_exception():
    norm = nn.BatchNorm1d(2)

    def fail():
        with buffers_kept(norm):
            norm(torch.randn(4, 2) + 5)
            assert norm.running_mean.abs().sum() > 0
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert (norm.running_mean == 0).all()
    assert norm.num_batches_tracked == 0


def test_those_of_the_types_left_out_stay_as_they_became():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False))
    with buffers_kept(model, but=(nn.BatchNorm1d,)):
        model(torch.randn(4, 2) + 5)
    assert all(norm.num_batches_tracked == 1 for norm in model)
