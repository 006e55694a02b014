import copy

import pytest
import torch
from torch import nn

from qtk.nn.batch_norm import BatchNorm

SHAPES = {nn.BatchNorm1d: (6, 4, 5), nn.BatchNorm2d: (3, 4, 2, 3), nn.BatchNorm3d: (2, 4, 2, 3, 1)}
OPTIONS = [
    {},
    {"momentum": None},
    {"momentum": 0.7, "eps": 1e-2},
    {"affine": False},
    {"track_running_stats": False},
]


def twin_of(reference: nn.Module) -> BatchNorm:
    return BatchNorm(reference.momentum, reference.eps, always_batch_statistics=not reference.track_running_stats)


def call(twin: BatchNorm, state: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return twin(x, state.weight, state.bias, state.running_mean, state.running_var, state.num_batches_tracked)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_three_steps_of_training_then_eval_are_those_of_torch(kind, options):
    torch.manual_seed(0)
    reference = kind(4, **options)
    state, twin = copy.deepcopy(reference), twin_of(reference)
    for step in range(4):
        if step == 3:
            reference.eval(), twin.eval()
        x = torch.randn(SHAPES[kind]) * 3 + 1
        expected = reference(x)
        assert torch.equal(call(twin, state, x), expected)
    assert all(torch.equal(a, b) for a, b in zip(reference.buffers(), state.buffers(), strict=True))


def test_eval_leaves_the_statistics_alone():
    state = nn.BatchNorm1d(4)
    before = copy.deepcopy(state.state_dict())
    call(twin_of(state).eval(), state, torch.randn(5, 4))
    assert all(torch.equal(before[key], value) for key, value in state.state_dict().items())


def test_has_no_state_of_its_own():
    assert BatchNorm(0.1, 1e-5).state_dict() == {}
