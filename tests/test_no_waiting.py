"""Nothing that runs for every batch waits for a GPU: observing, simulating, training.

The model's tensors are fakes on a device "cuda", which need no GPU: to read a number of one is an error, and so is, in
these tests, to copy one to the host.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import qtk
from qtk.observers import extremes, histogram
from qtk.torch_private import FakeTensorMode
from qtk.workflow import calibrate
from qtk.workflow.forward_pass import run_all
from tests.zoo.attention import TinyViT
from tests.zoo.convolutions import Residual

aten = torch.ops.aten
COPIES = {aten._to_copy.default: 0, aten.copy_.default: 1, aten._copy_from.default: 0}
"""Operators that copy, and the place of the argument that is read."""


class NoCopyToHost(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if op in COPIES and args[COPIES[op]].is_cuda and not result.is_cuda:
            raise AssertionError(f"{op} waits for the GPU")
        return result


class Waits(TorchDispatchMode):
    """Counts the operators that make the host wait for a number or a shape."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.number += op in (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default)
        return op(*args, **(kwargs or {}))


def faked(model, device):
    """The model with fakes in place of its parameters and buffers; to be called in a FakeTensorMode."""
    known = {}

    def fake(tensor):
        if id(tensor) not in known:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
        return known[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: fake(tensor) for name, tensor in held.items() if tensor is not None})
    return model


def residual():
    return Residual().eval(), torch.randn(2, 3, 8, 8)


def vit():
    return TinyViT().eval(), torch.randn(2, 3, 8, 8)


MODELS = {"residual": residual, "vit": vit}


@pytest.fixture(params=MODELS)
def given(request):
    torch.manual_seed(0)
    return MODELS[request.param]()


@pytest.mark.parametrize("scheme", sorted({*qtk.SCHEMES} - {"activation_mse"}))  # which needs autograd on a GPU
def test_observing_a_batch(given, scheme):
    model, x = given
    sim = qtk.QuantSim(model, x, scheme=scheme)
    sim.compute_encodings([x], progress=False)
    sites = calibrate.sites_to_calibrate(sim._simulation)
    observers = {site: calibrate._observer(plan) for site, plan in sites.items() if not plan.static}
    assert observers
    with FakeTensorMode(), NoCopyToHost():
        faked(sim.model, "cuda")
        with calibrate._observing(sim._simulation, observers):
            run_all(sim.model, [torch.empty(x.shape, device="cuda") for _ in range(2)], progress=False)


@pytest.mark.parametrize("setting", ["fixed", "learned", "tracked", "dynamic"])
def test_simulating_and_training(given, setting):
    """That learned scales are looked at late is tested with ``lost_range``: nothing is looked at in fakes."""
    model, x = given
    config = {"version": 1, "defaults": {"activation": {"dynamic": setting == "dynamic"}}}
    sim = qtk.QuantSim(model, x, config=config)
    sim.compute_encodings([x], progress=False)
    if setting == "learned":
        sim.learn_ranges()
    if setting == "tracked":
        sim.track_weights("*")
    in_eval, in_train, in_step = (copy.deepcopy(sim.model).train(each) for each in (False, True, True))
    with FakeTensorMode(), NoCopyToHost():
        for one in (in_eval, in_train):
            output = faked(one, "cuda")(torch.empty(x.shape, device="cuda"))
            assert output.is_cuda
    with FakeTensorMode():  # autograd needs a GPU for tensors on one
        one = faked(in_step, "cpu")
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        one(torch.empty(x.shape)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("scheme", ["min_max", "mse"])
def test_the_end_of_a_calibration_waits_a_few_times_a_site_and_not_for_each_batch(given, scheme, monkeypatch):
    """On real tensors, which the observers take for those of an accelerator."""
    model, x = given
    for module in (extremes, histogram):
        monkeypatch.setattr(module, "on_cpu", lambda x: False)
    waits = []
    for batches in (1, 4):
        sim = qtk.QuantSim(model, x, scheme=scheme)
        with Waits() as counted:
            sim.compute_encodings([x] * batches, progress=False)
        waits.append(counted.number)
    assert waits[0] == waits[1]
    assert 0 < waits[0] <= 16 * len(sim.encodings())
