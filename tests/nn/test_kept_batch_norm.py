"""Weight and bias of a layer as its batch norm will change them, against loops over channels and against torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtk.nn import kept_batch_norm as kept


def norm(channels, training=False):
    module = nn.BatchNorm2d(channels).train(training)
    torch.manual_seed(3)
    nn.init.uniform_(module.weight, -1.5, 1.5)
    nn.init.normal_(module.bias)
    module.running_mean.normal_()
    module.running_var.uniform_(0.2, 3.0)
    return module


def test_every_channel_of_a_grouped_transposed_weight_has_its_own_number():
    weight, values = torch.randn(6, 2, 3, 3), torch.randn(4)
    scaled = kept.scaled_weight(weight, values, axis=1, groups=2)
    for into in range(6):
        for out in range(2):
            channel = (into // 3) * 2 + out
            assert torch.equal(scaled[into, out], weight[into, out] * values[channel])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weight_and_bias_are_those_of_the_folded_layer(dtype):
    module, conv = norm(4).to(dtype), nn.Conv2d(3, 4, 3).to(dtype)
    weight = kept.folded_weight(conv.weight, module.weight, module.running_var, module, 0, 1)
    bias = kept.folded_bias(conv.bias, module.weight, module.bias, module.running_mean, module.running_var,
                            conv.weight, module)
    assert weight.dtype == bias.dtype == dtype
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    exact = F.conv2d(x, weight.double(), bias.double())
    expected = module.double()(conv.double()(x))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(exact, expected, rtol=tolerance, atol=tolerance)


def test_train_mode_divides_by_the_scale_and_eval_mode_does_not():
    module, weight, bias = norm(4, training=True), torch.randn(4, 3, 3, 3), torch.randn(4)
    arguments = (module.weight, module.running_var, module, 0, 1)
    folded = kept.folded_weight(weight, *arguments)
    torch.testing.assert_close(kept.weight_in_use(folded, weight, *arguments), weight)
    torch.testing.assert_close(kept.weight_in_use(3 * folded, weight, *arguments), 3 * weight)
    assert kept.bias_in_use(folded[0, 0, 0], bias, module) is bias
    assert kept.bias_in_use(folded[0, 0, 0], None, module) is None
    module.eval()
    assert kept.weight_in_use(folded, weight, *arguments) is folded
    assert kept.bias_in_use(folded, bias, module) is folded
    x = torch.randn(2, 4, 5, 5)
    parameters = module.weight, module.bias, module.running_mean, module.running_var, None, module
    assert kept.kept_batch_norm(x, *parameters) is x


@pytest.mark.parametrize("gamma", [0.0, -0.0, 1e-42, 1e-30, -1e-30])
def test_a_gamma_of_zero_leaves_the_weight_of_its_channel_as_it_is(gamma):
    """Its gradient is that of the float model too; 0 / 0 would make all of them NaN."""
    module, weight = norm(4, training=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    with torch.no_grad():
        module.weight[1] = gamma
    arguments = (module.weight, module.running_var, module, 0, 1)
    used = kept.weight_in_use(kept.folded_weight(weight, *arguments), weight, *arguments)
    torch.testing.assert_close(used, weight)
    x = torch.randn(2, 3, 6, 6)
    y = kept.kept_batch_norm(F.conv2d(x, used), module.weight, module.bias, module.running_mean, module.running_var,
                             None, module)
    ours = torch.autograd.grad(y.square().sum(), (weight, module.weight))
    reference = F.batch_norm(F.conv2d(x, weight), None, None, module.weight, module.bias, True)
    expected = torch.autograd.grad(reference.square().sum(), (weight, module.weight))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


def test_first_and_second_derivatives_are_those_of_finite_differences():
    module = norm(4, training=True).double()
    folded, weight = torch.randn(4, 2, 1, 1).double().requires_grad_(), torch.randn(4, 2, 1, 1).double()
    gamma = module.weight.detach().clone().requires_grad_()

    def unscaled(folded, gamma):
        return kept.unscaled_weight(folded, weight, gamma, module.running_var, module, 0, 1)

    assert torch.autograd.gradcheck(unscaled, (folded, gamma))
    assert torch.autograd.gradgradcheck(unscaled, (folded, gamma))


def test_while_hooks_wait_for_the_batch_norm_it_is_called():
    module, calls = norm(4), []
    module.register_forward_hook(lambda *_: calls.append(1))
    assert not kept.is_folded(module)
    x = torch.randn(2, 4, 5, 5)
    y = kept.kept_batch_norm(x, module.weight, module.bias, module.running_mean, module.running_var, None, module)
    torch.testing.assert_close(y, module(x))
    assert len(calls) == 2


@pytest.mark.parametrize(("shape", "axis", "rank"), [((2, 5, 4), -1, 2), ((2, 3, 5, 4), -1, 4), ((2, 4, 3, 3), 1, 3),
                                                     ((2, 4, 1, 1), 1, 2)])
@pytest.mark.parametrize("hooked", [False, True])
def test_channels_at_another_axis_are_normalised_as_rows_and_torchs_module_takes_them(shape, axis, rank, hooked):
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[rank]
    modules = [kind(4).train() for _ in range(2)]
    for module in modules:
        nn.init.uniform_(module.weight, generator=torch.Generator().manual_seed(1))
    x = torch.randn(shape)
    calls = []
    if hooked:
        modules[0].register_forward_hook(lambda *_: calls.append(1))
    parameters = (modules[0].weight, modules[0].bias, modules[0].running_mean, modules[0].running_var, None, modules[0])
    y = kept.kept_batch_norm(x, *parameters, axis, rank)
    rows = x.movedim(axis, -1).reshape(-1, 4)
    expected = F.batch_norm(rows, modules[1].running_mean, modules[1].running_var, modules[1].weight, modules[1].bias,
                            True)
    torch.testing.assert_close(y.movedim(axis, -1).reshape(-1, 4), expected)
    torch.testing.assert_close(modules[0].running_var, modules[1].running_var)
    assert y.shape == x.shape
    assert len(calls) == int(hooked)
    assert kept.kept_batch_norm(x, *parameters[:-1], modules[0].eval(), axis, rank).shape == x.shape
