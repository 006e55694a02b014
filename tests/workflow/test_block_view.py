"""The block view against the simulation it was made of: same bits, same tensors, and modules that are called."""

import copy
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

import qtk
from qtk.demo.small_vit import SmallViT
from qtk.errors import CaptureError
from tests.zoo.models import ZOO

ROOT = Path(__file__).parents[2]
RANKS = 2


def simulation(model, inputs, *, calibrate=True, **settings):
    sim = qtk.QuantSim(model, inputs, **settings)
    if calibrate:
        sim.compute_encodings([inputs], progress=False)
    return sim


def vit(**settings):
    torch.manual_seed(0)
    return simulation(SmallViT().eval(), torch.randn(4, 1, 8, 8), **settings)


def step(model, parameters, inputs, seed=3):
    """Outputs and gradients of one training step."""
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(seed)
    output = model(*inputs)
    leaves = output if isinstance(output, tuple) else (output,)
    sum(leaf.double().square().sum() for leaf in leaves).backward()
    grads = [None if p.grad is None else p.grad.clone() for p in parameters]
    return [leaf.detach() for leaf in leaves], grads


def same(a, b):
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def learn(sim):
    for quantizer in sim.quantizers.values():
        if not quantizer.spec.dynamic:
            quantizer.learn_range()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_outputs_and_gradients_are_those_of_the_simulation_bit_for_bit(train, recompute):
    sim = vit()
    learn(sim)
    view = qtk.block_view(sim, "blocks.*", checkpoint=recompute)
    assert list(view.named_blocks()) == ["blocks.0", "blocks.1", "blocks.2"]
    sim.model.train(train)
    parameters, x = list(sim.model.parameters()), torch.randn(4, 1, 8, 8)
    outputs, grads = step(sim.model, parameters, (x,))
    assert sum(grad is not None for grad in grads) > 100
    seen, gradients = step(view, parameters, (x,))
    assert same(outputs, seen)
    assert same(grads, gradients)
    if train:
        assert not same(outputs, step(view, parameters, (x,), seed=4)[0])  # dropout is on


def test_members_are_those_of_the_simulation():
    sim = vit()
    view = qtk.block_view(sim, "blocks.*")
    for of in (nn.Module.named_parameters, nn.Module.named_buffers):
        mine, theirs = list(of(view)), list(of(sim.model))
        assert [name for name, _ in mine] == [name for name, _ in theirs]
        assert all(a is b for (_, a), (_, b) in zip(mine, theirs, strict=True))
    assert list(view.state_dict()) == list(sim.model.state_dict())
    other = vit(weight_bits=4)
    view.load_state_dict(sim.model.state_dict())
    with torch.no_grad():
        view.get_submodule("blocks.1.mlp.0").weight.mul_(2)
        assert torch.equal(view(torch.ones(1, 1, 8, 8)), sim.model(torch.ones(1, 1, 8, 8)))
    assert not torch.equal(other.model.state_dict()["blocks.1.mlp.0.weight"],
                           sim.model.state_dict()["blocks.1.mlp.0.weight"])


MODELS = sorted(ZOO)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_cut_at_all_its_modules(name):
    """At every module that is called, one after another: the same outputs, also calibrated after the view was made."""
    entry = ZOO[name]
    sim = qtk.QuantSim(entry.model(), entry.inputs())
    try:
        view = qtk.block_view(sim, "*")
    except CaptureError as error:
        assert "islands" in str(error) or "calls as it is" in str(error) or "matches no module" in str(error)
        return
    batch = entry.inputs()
    batch = batch if isinstance(batch, (torch.Tensor, dict)) else tuple(batch)
    before = view(**batch) if isinstance(batch, dict) else None  # noqa: F841
    sim.compute_encodings([batch], progress=False)
    expected = torch.utils._pytree.tree_leaves(entry.run(sim.model))
    assert all(torch.equal(a, b, ) if isinstance(a, torch.Tensor) else a == b for a, b in zip(
        expected, torch.utils._pytree.tree_leaves(entry.run(view)), strict=True))
