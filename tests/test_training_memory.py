"""What a training step through the simulation keeps for its backward pass, on trained models."""

import pytest
import torch
import torch.nn.functional as F

import qtk

pytest.importorskip("sklearn")

from qtk.demo.digits import load_digits_split
from qtk.demo.models import build
from qtk.nn import attention
from qtk.ops import fake_quantize


def simulation(name):
    images = load_digits_split().train_images[:64]
    sim = qtk.QuantSim(build(name), images, weight_bits=4, activation_bits=8)
    sim.compute_encodings([images], progress=False)
    return sim


def loss_of(model):
    digits = load_digits_split()
    return F.cross_entropy(model(digits.train_images[:64]), digits.train_labels[:64])


def kept_bytes(model):
    """Bytes of all tensors that autograd saves beside parameters and buffers, each storage once."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model)
    del loss
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", ["digits_cnn", "digits_vit"])
def test_gradients_are_those_of_a_graph_that_keeps_every_float(monkeypatch, name):
    sim = simulation(name)
    sim.model.train()
    found = []
    for everything in (False, True):
        if everything:
            monkeypatch.setattr(fake_quantize, "saves_residual", lambda *given: False)
            monkeypatch.setattr(attention, "recomputed", lambda module, *inputs: module(*inputs))
        torch.manual_seed(0)  # of dropout
        found.append(torch.autograd.grad(loss_of(sim.model), list(sim.model.parameters())))
    assert all(torch.equal(own, other) for own, other in zip(*found, strict=True))


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("learned", "limit"), [(False, 1.5), (True, 1.8)])
def test_a_transformer_keeps_little_more_than_in_float(learned, limit):
    sim = simulation("digits_vit")
    if learned:
        sim.learn_ranges()
    assert kept_bytes(sim.model.train()) <= limit * kept_bytes(build("digits_vit").train())
