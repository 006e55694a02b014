import copy
import warnings

import pytest
import torch
from torch import nn

from qtk.errors import CaptureError
from qtk.nn.batch_norm import BatchNorm, batch_norm

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


def call(module: nn.Module, state: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mean, var, counter = state.running_mean, state.running_var, state.num_batches_tracked
    return batch_norm(x, state.weight, state.bias, mean, var, counter, module)


@pytest.mark.medium
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("by", [twin_of, lambda state: state], ids=["settings", "module"])
def test_three_steps_of_training_then_eval_are_those_of_torch(kind, options, by):
    torch.manual_seed(0)
    reference = kind(4, **options)
    state = copy.deepcopy(reference)
    twin = by(state)
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


@pytest.mark.parametrize("name", ["momentum", "eps", "track_running_stats"])
def test_settings_act_as_in_torch(name):
    torch.manual_seed(0)
    reference = nn.BatchNorm1d(4)
    state = copy.deepcopy(reference)
    for module in (reference, state):
        setattr(module, name, {"momentum": 0.9, "eps": 0.3, "track_running_stats": False}[name])
    x = torch.randn(5, 4) * 3
    assert torch.equal(call(state, state, x), reference(x))
    assert all(torch.equal(a, b) for a, b in zip(reference.buffers(), state.buffers(), strict=True))


def test_arguments_stand_in_for_the_parameters_of_the_module():
    for kind in (nn.BatchNorm1d, nn.SyncBatchNorm):
        norm, x = kind(4), torch.randn(5, 4)
        quantized = copy.deepcopy(norm)
        with torch.no_grad():
            quantized.weight.fill_(0.7), quantized.bias.fill_(0.2)
        result = batch_norm(x, quantized.weight, quantized.bias, norm.running_mean, norm.running_var, None, norm)
        assert torch.equal(result, quantized(x))
        assert torch.equal(norm.running_mean, quantized.running_mean)
        assert int(norm.num_batches_tracked) == 1


def test_a_frozen_one_normalises_by_its_statistics_in_train_mode():
    ops = pytest.importorskip("torchvision.ops")
    frozen, x = ops.FrozenBatchNorm2d(4).train(), torch.randn(5, 4, 2, 2)
    frozen.running_mean.fill_(0.5)
    result = batch_norm(x, frozen.weight, frozen.bias, frozen.running_mean, frozen.running_var, None, frozen)
    torch.testing.assert_close(result, frozen(x))


def test_another_module_in_its_place_is_refused_by_name():
    norm, other = nn.BatchNorm1d(4), nn.GroupNorm(1, 4)
    with pytest.raises(CaptureError, match="a GroupNorm stands in the place of a batch norm"):
        batch_norm(torch.randn(5, 4), norm.weight, norm.bias, norm.running_mean, norm.running_var, None, other)


@pytest.mark.parametrize("training", [True, False])
def test_hooks_on_the_module_fire(training):
    torch.manual_seed(0)
    plain, hooked = nn.BatchNorm1d(3).train(training), nn.BatchNorm1d(3).train(training)
    seen = []
    hooked.register_forward_hook(lambda module, args, output: seen.append("forward"))
    hooked.register_full_backward_hook(lambda module, of_inputs, of_outputs: seen.append("backward"))
    x = torch.randn(5, 3, requires_grad=True)
    made = [batch_norm(x, m.weight, m.bias, m.running_mean, m.running_var, None, m) for m in (plain, hooked)]
    assert torch.equal(*made)
    assert torch.equal(plain.running_mean, hooked.running_mean)
    made[1].sum().backward()
    assert seen == ["forward", "backward"]


class Doubled(nn.BatchNorm1d):
    def forward(self, x):
        return 2 * super().forward(x)


def test_hooks_that_cannot_fire_are_named():
    module, x = Doubled(3).eval(), torch.randn(4, 3)
    tensors = (module.weight, module.bias, module.running_mean, module.running_var, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = batch_norm(x, *tensors, module)

    def spy(*_):
        raise AssertionError

    module.register_forward_hook(spy)
    with pytest.warns(UserWarning, match=r"hooks of a Doubled that will not be called: .*spy; .*block_view"):
        assert torch.equal(batch_norm(x, *tensors, module), expected)
