"""The function that eager mode calls is the one that transforms and compilers see."""

import pytest
import torch
from torch.func import grad, vmap

from qtk.ops.eager_function import differentiable


def save(ctx, inputs, output):
    x, ctx.factor = inputs
    ctx.save_for_backward(x)
    ctx.seen = output.shape


def backward(ctx, upstream):
    (x,) = ctx.saved_tensors
    assert ctx.needs_input_grad == (True, False)
    assert upstream.shape == ctx.seen == x.shape
    return upstream * ctx.factor, None


scaled = differentiable(lambda x, factor: x * factor, save, backward)
X = torch.randn(3, 4)


def test_eager_mode_has_its_values_and_gradients():
    x = X.clone().requires_grad_()
    y = scaled(x, 3.0)
    assert torch.equal(y, X * 3)
    (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(found, torch.full((3, 4), 3.0))


def test_second_derivatives_go_through_the_backward_pass():
    x = X.clone().requires_grad_()
    upstream = torch.ones_like(x, requires_grad=True)
    (found,) = torch.autograd.grad(scaled(x, 3.0), x, upstream, create_graph=True)
    assert torch.equal(torch.autograd.grad(found.sum(), upstream)[0], torch.full((3, 4), 3.0))


@pytest.mark.parametrize("transformed", [
    lambda x: vmap(lambda row: scaled(row, 3.0))(x), lambda x: grad(lambda x: (scaled(x, 3.0) * x.detach()).sum())(x),
])
def test_transforms_see_the_function_with_a_rule(transformed):
    torch.testing.assert_close(transformed(X), X * 3)


def test_no_signature_is_looked_up_in_eager_mode(monkeypatch):
    monkeypatch.setattr("inspect.signature", lambda *_, **__: pytest.fail("looked up"))
    assert torch.equal(scaled(X, 3.0), X * 3)
