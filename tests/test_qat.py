"""Training through the simulation, on real images."""

import pytest
import torch
import torch.nn.functional as F

import qtk

pytest.importorskip("sklearn")

from qtk.demo.digits import load_digits_split
from qtk.demo.models import build

PER_TENSOR = {"version": 1, "fold_batch_norms": False, "defaults": {"weight": {"granularity": "per_tensor"}}}
"""The hard case: at W4A4 even one scale a tensor leaves little to gain on this net."""


@pytest.mark.medium
def test_w3a3_training_gains_accuracy_from_the_calibrated_start():
    digits = load_digits_split()
    sim = qtk.QuantSim(
        build("digits_cnn"), digits.train_images[:8], weight_bits=3, activation_bits=3, config=PER_TENSOR
    )
    sim.compute_encodings(digits.train_images[:512].split(64), progress=False)

    def accuracy() -> float:
        sim.model.eval()
        with torch.no_grad():
            return float((sim.model(digits.test_images).argmax(1) == digits.test_labels).double().mean())

    start = accuracy()
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(sim.model.parameters(), lr=1e-3)
    for _ in range(3):
        sim.model.train()
        for rows in torch.randperm(len(digits.train_images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(sim.model(digits.train_images[rows]), digits.train_labels[rows]).backward()
            optimizer.step()
    sim.check()
    assert start < 0.9  # there was something to gain
    assert accuracy() > start + 0.1


@pytest.mark.slow
def test_learned_ranges_gain_on_a_gru_of_2_bits():
    """6 epochs: 95.4 % of the images with fixed ranges, 96.9 % with learned ones."""
    digits = load_digits_split()
    accuracies = {}
    for learned in (False, True):
        sim = qtk.QuantSim(build("digits_gru"), digits.train_images[:8], weight_bits=2, activation_bits=2)
        sim.compute_encodings(digits.train_images[:512].split(64), progress=False)
        groups = [{"params": sim.weight_parameters()}]
        if learned:
            sim.learn_ranges()
            groups.append({"params": sim.range_parameters(), "lr": 1e-2})
        optimizer = torch.optim.Adam(groups, lr=1e-3)
        torch.manual_seed(0)
        for _ in range(6):
            sim.model.train()
            for rows in torch.randperm(len(digits.train_images)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(sim.model(digits.train_images[rows]), digits.train_labels[rows]).backward()
                optimizer.step()
        sim.check()
        sim.model.eval()
        with torch.no_grad():
            hits = sim.model(digits.test_images).argmax(1) == digits.test_labels
        accuracies[learned] = float(hits.double().mean())
    assert accuracies[True] > max(0.95, accuracies[False])
