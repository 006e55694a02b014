"""Quantization-aware training in a plain PyTorch loop: a vision transformer for digits in 4 bits.

Run: ``python examples/qat_plain.py --epochs 10``.
"""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
epochs = parser.parse_args().epochs

torch.manual_seed(0)
digits = load_digits_split()
batches = DataLoader(TensorDataset(digits.train_images, digits.train_labels), batch_size=32, shuffle=True)


def top1(model: torch.nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(digits.test_images).argmax(1) == digits.test_labels).double().mean())


# 1. Calibrate: training starts from the ranges that post-training quantization finds.
sim = qtk.QuantSim(build("digits_vit"), digits.train_images[:8], weight_bits=4, activation_bits=4)
sim.compute_encodings(digits.train_images[:512].split(64))
print(f"W4A4, calibrated: {top1(sim.model):.2%}")

# 2. Let the ranges learn. From here on they are parameters: make the optimizer now, and decay the weights only.
sim.learn_ranges()
weights = {"params": sim.weight_parameters(), "weight_decay": 0.01}
ranges = {"params": sim.range_parameters(), "weight_decay": 0.0}
optimizer = torch.optim.AdamW([weights, ranges], lr=2e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * len(batches), pct_start=0.1)

# 3. Train as ever.
for _ in range(epochs):
    sim.model.train()
    for images, labels in batches:
        loss = cross_entropy(sim.model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

# 4. What was trained is what is exported.
print(f"W4A4, trained: {top1(sim.model):.2%}")
sim.export("digits-w4a4", formats=("onnx", "encodings"), force=True)
