"""Hooks that a model carries into prepare_model: captured, kept, or lost with a warning."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import qtk


def observe(module, args, output):
    """Looks on."""


def look_before(module, args):
    """Looks on."""


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))).eval()


class Watcher(nn.Module):
    """A module whose method is a hook of another."""

    def see(self, module, grads, outs):
        """Looks on."""


@pytest.mark.parametrize(("path", "register", "hook", "text"), [
    ("0", "register_forward_hook", observe, "forward hook observe of 0;"),
    ("1.1", "register_forward_pre_hook", look_before, "forward pre-hook look_before of 1.1;"),
    ("1", "register_full_backward_hook", Watcher().see, "backward hook Watcher.see of 1;"),
    ("", "register_forward_hook", functools.partial(observe), "forward hook observe of the model;"),
])
def test_a_hook_that_will_not_be_called_is_named(path, register, hook, text):
    model, x = net(), torch.randn(3, 4)
    expected = model(x)
    getattr(model.get_submodule(path), register)(hook)
    with pytest.warns(UserWarning, match=f"will not be called: {text}.*qtk.block_view"):
        sim = qtk.QuantSim(model, x)
    with qtk.quantizers.modes.in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
        torch.testing.assert_close(sim.model(x), expected)


def test_many_are_counted():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(7)))
    for layer in model:
        layer.register_forward_hook(observe)
    with pytest.warns(UserWarning, match="observe of 4 and 2 more;"):
        qtk.prepare_model(model, torch.randn(2, 2))


@pytest.mark.medium
@pytest.mark.parametrize("change", [
    weight_norm, parametrizations.weight_norm, spectral_norm, parametrizations.spectral_norm,
    functools.partial(prune.l1_unstructured, name="weight", amount=0.5),
])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_computes_parameters_is_captured_without_a_warning(change):
    model, x = net(), torch.randn(3, 4)
    change(model[1][1])
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        prepared = qtk.prepare_model(model, x)
    assert torch.equal(prepared(x), model(x))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    torch.testing.assert_close(prepared(x), model(x))


class Half(prune.BasePruningMethod):
    """A user's own way of pruning."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        mask = default_mask.clone()
        mask.view(-1)[::2] = 0
        return mask

    def __call__(self, module, args):
        super().__call__(module, args)


@pytest.mark.medium
@pytest.mark.parametrize("registered", [
    lambda hook: hook, lambda hook: hook.__call__, functools.partial,
    lambda hook: functools.partial(functools.partial(hook.__call__)),
], ids=["object", "method", "partial", "partials"])
def test_a_subclass_of_torchs_and_what_wraps_it_are_captured_too(registered):
    model, x = net(), torch.randn(3, 4)
    Half.apply(model[1][1], "weight")
    ((key, hook),) = model[1][1]._forward_pre_hooks.items()
    model[1][1]._forward_pre_hooks[key] = registered(hook)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        prepared = qtk.prepare_model(model, x)
    assert torch.equal(prepared(x), model(x))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = net(), nn.Linear(2, 2)

    def forward(self, x):
        y = self.inner(x)
        return self.outer(y) if bool((x > -9).all()) else self.outer(-y)


@pytest.mark.medium
def test_python_that_is_kept_keeps_its_hooks():
    model, calls = Branches().eval(), []
    model.register_forward_hook(lambda *_: calls.append("model"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        prepared = qtk.prepare_model(model, torch.randn(3, 4))
    calls.clear()
    prepared(torch.randn(3, 4))
    assert calls == ["model"]
    model.inner.register_forward_hook(lambda *_: calls.append("island"))
    with pytest.warns(UserWarning, match="of inner;"):
        qtk.prepare_model(model, torch.randn(3, 4))
