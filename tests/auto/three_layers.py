"""Assigns widths to a small MLP whose layers lose differently by few bits."""

import torch
from torch import nn

import qtk

BATCHES = torch.randn(4, 64, 16, generator=torch.Generator().manual_seed(0)).unbind(0)


def mlp():
    """Three layers, the second of which has weights of very different sizes in each row: few bits lose much there."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    with torch.no_grad():
        net[2].weight[:, 0] *= 30
    return net


def assigned(budget, model=None, **options):
    made = {name: options.pop(name) for name in ("config", "weight_bits", "activation_bits") if name in options}
    sim = qtk.QuantSim(mlp() if model is None else model, BATCHES[0], **made)
    return sim, qtk.assign_bits(sim, BATCHES, budget=budget, progress=False, **options)


def widths(sim):
    return {name: quantizer.spec.dtype.bits for name, quantizer in sim.quantizers.items()}


def error(sim):
    """Σ (simulated - float)² / Σ float², by hand."""
    net = mlp()
    with torch.no_grad():
        pairs = [(sim.model(batch), net(batch)) for batch in BATCHES]
    noise, signal = (sum(each.double().square().sum() for each in of)
                     for of in ((a - b for a, b in pairs), (b for _, b in pairs)))
    return (noise / signal).item()
