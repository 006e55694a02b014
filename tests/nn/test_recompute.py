import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from qtk.nn.recompute import recomputed
from qtk.nn.tap import Tap


class Wave(Tap):
    """Counts its calls, and adds noise in train mode."""

    idle = False
    repeatable = True

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))
        self.dropout = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.dropout((x * self.weight).sin().exp()).sin()


def inputs():
    torch.manual_seed(0)
    return torch.randn(1000, requires_grad=True)


def gradients(result, *inputs):
    torch.manual_seed(7)  # another state than the forward's
    return torch.autograd.grad(result, inputs, torch.linspace(-1, 1, 1000).to(result.dtype))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_are_the_same_bit_for_bit(dtype, training):
    module, x = Wave().train(training), inputs()
    found = []
    for run in (module, lambda x: recomputed(module, x)):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            result = run(x)
        found.append((result, *gradients(result, x, module.weight)))
    assert module.calls == 3
    assert all(torch.equal(own, other) for own, other in zip(*found, strict=True))


def test_no_inner_value_is_kept():
    def kept_bytes(run):
        sizes = []
        with saved_tensors_hooks(lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda tensor: tensor):
            run()
        return sum(sizes)

    x = inputs()
    assert kept_bytes(lambda: Wave()(x)) > 4 * x.nbytes
    assert kept_bytes(lambda: recomputed(Wave(), x)) <= x.nbytes


@pytest.mark.parametrize("prepare", [
    lambda module: module.register_forward_hook(lambda *given: None),
    lambda module: module.dropout.register_forward_pre_hook(lambda *given: None),
    lambda module: module.register_full_backward_hook(lambda *given: None),
    lambda module: setattr(module, "repeatable", False),
])
def test_what_would_see_a_second_run_sees_one(prepare):
    module, x = Wave(), inputs()
    prepare(module)
    gradients(recomputed(module, x), x)
    assert module.calls == 1


def test_a_tracer_sees_one_run():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    module, x = Wave(), inputs()
    with Seen():
        gradients(recomputed(module, x), x)
    assert module.calls == 1


def test_without_a_gradient_nothing_is_prepared():
    module, x = Wave(), inputs()
    with torch.no_grad():
        assert recomputed(module, x).grad_fn is None
    assert "Checkpoint" not in str(recomputed(module, x.detach()).grad_fn)
    assert module.calls == 2


@pytest.mark.parametrize("change", [
    lambda module: module.eval(),
    lambda module: setattr(module, "idle", True),
    lambda module: torch.no_grad()(module.weight.mul_)(2),
    lambda module: setattr(module, "weight", nn.Parameter(torch.tensor(1.5))),
])
def test_a_module_changed_in_between_is_an_error_not_another_gradient(change):
    module, x = Wave(), inputs()
    result = recomputed(module, x)
    change(module)
    with pytest.raises(RuntimeError, match="between forward and backward"):
        gradients(result, x)


def test_a_change_that_was_undone_is_none():
    module, x = Wave(), inputs()
    result = recomputed(module, x)
    module.eval()
    module.train()
    gradients(result, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_of_a_checkpoint(reentrant):
    module, x = Wave().eval(), inputs()
    expected, = gradients(module(x), x)
    checkpoint(lambda x: recomputed(module, x), x, use_reentrant=reentrant).backward(torch.linspace(-1, 1, 1000))
    assert torch.equal(x.grad, expected)


def test_gradients_twice_and_of_gradients():
    module, x = Wave().eval(), inputs()
    found = []
    for run in (module, lambda x: recomputed(module, x)):
        result = run(x)
        first, = torch.autograd.grad(result.sum(), x, create_graph=True)
        second, = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        again, = torch.autograd.grad(result.sum(), x)
        found.append((first, second, again))
    assert all(torch.equal(own, other) for own, other in zip(*found, strict=True))


@pytest.mark.medium
def test_where_autograd_cannot_it_is_a_plain_call():
    module, x = Wave().eval(), inputs()
    expected, = torch.autograd.grad(module(x).sum(), x)
    with disable_saved_tensors_hooks("not here"):
        found, = torch.autograd.grad(recomputed(module, x).sum(), x)
    assert torch.equal(found, expected)
    assert torch.allclose(torch.func.grad(lambda x: recomputed(module, x).sum())(x), expected)
    compiled = torch.compile(lambda x: recomputed(module, x), backend="aot_eager", fullgraph=True)
    assert torch.allclose(torch.autograd.grad(compiled(x).sum(), x)[0], expected)
