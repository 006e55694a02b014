import copy

import torch
from torch import nn

from qtk.nn.instance_norm import InstanceNorm


def test_training_and_eval_are_those_of_torch():
    torch.manual_seed(0)
    reference = nn.InstanceNorm2d(3, affine=True, track_running_stats=True, momentum=0.4)
    state, twin = copy.deepcopy(reference), InstanceNorm(0.4, reference.eps)
    for step in range(3):
        if step == 2:
            reference.eval(), twin.eval()
        x = torch.randn(2, 3, 4, 5) * 2 + 1
        found = twin(x, state.weight, state.bias, state.running_mean, state.running_var)
        assert torch.equal(found, reference(x))
    assert torch.equal(state.running_mean, reference.running_mean)
    assert torch.equal(state.running_var, reference.running_var)
    assert float(state.running_mean.abs().min()) > 0
