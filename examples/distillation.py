"""Quantization-aware training without labels: the float model teaches its own 3-bit version.

Run: ``python examples/distillation.py --epochs 10``.
"""

import argparse

import torch

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
epochs = parser.parse_args().epochs

torch.manual_seed(0)
digits = load_digits_split()
teacher = build("digits_gru")


def top1(model: torch.nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(digits.test_images).argmax(1) == digits.test_labels).double().mean())


sim = qtk.QuantSim(build("digits_gru"), digits.train_images[:8], weight_bits=3, activation_bits=3)
sim.compute_encodings(digits.train_images[:512].split(64))
print(f"float: {top1(teacher):.2%}; W3A3, calibrated: {top1(sim.model):.2%}")

sim.learn_ranges()
optimizer = torch.optim.Adam([*sim.weight_parameters(), *sim.range_parameters()], lr=1e-2)
steps = epochs * len(digits.train_images.split(32))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps, pct_start=0.1)
for _ in range(epochs):
    sim.model.train()
    for images in digits.train_images[torch.randperm(len(digits.train_images))].split(32):
        with torch.no_grad():
            teacher_scores = teacher(images)
        loss = qtk.distillation_loss(sim.model(images), teacher_scores, temperature=2.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
print(f"W3A3, trained: {top1(sim.model):.2%}")
