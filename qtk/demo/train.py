"""Trains the embedded models and writes their weights: ``python -m qtk.demo.train [--validate] [MODEL ...]``.

The hyperparameters were chosen without the test images: ``--validate`` holds out a fifth of the training images, scores
the models on these, and writes no file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from qtk.demo.augment import augmented
from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS
from qtk.numerics.top1 import Top1

EPOCHS = {"digits_cnn": 120, "digits_vit": 300, "digits_lstm": 200, "digits_gru": 200}
LEARNING_RATE = {"digits_cnn": 4e-3, "digits_vit": 2e-3, "digits_lstm": 2e-2, "digits_gru": 2e-2}
WEIGHT_DECAY = 0.05
WARM_UP = 0.05
BATCH_SIZE = 64
LABEL_SMOOTHING = 0.1
WEIGHTS = Path(__file__).parent / "weights"


def train(name: str, images: Tensor, labels: Tensor, *, seed: int = 0, progress: bool = True) -> nn.Module:
    """A new model called ``name``, trained on augmented ``images``; in eval mode.

    Shape: images [N, 1, 8, 8], labels [N].
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = DEMO_MODELS[name]().train()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=WEIGHT_DECAY)
    steps = EPOCHS[name] * (len(images) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE[name], total_steps=steps, pct_start=WARM_UP, cycle_momentum=False
    )
    for _ in tqdm(range(EPOCHS[name]), desc=f"training {name}", unit="epoch", disable=not progress):
        order = torch.randperm(len(images), generator=generator)
        for rows in torch.split(order[: len(images) // BATCH_SIZE * BATCH_SIZE], BATCH_SIZE):
            loss = cross_entropy(
                model(augmented(images[rows], generator)), labels[rows], label_smoothing=LABEL_SMOOTHING
            )
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval()


def top1(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images whose highest score is their label, 0…1. Shape: images [N, 1, 8, 8], labels [N]."""
    counted = Top1()
    with torch.no_grad():
        counted.add(model(images), labels)
    return counted.share or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m qtk.demo.train", description="trains the embedded models")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(DEMO_MODELS)}; default: all")
    parser.add_argument("--validate", action="store_true", help="score on held-out training images; write nothing")
    parser.add_argument("--output", type=Path, default=WEIGHTS, help="directory for the safetensors files")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    split = load_digits_split()
    for name in arguments.models or DEMO_MODELS:
        images, labels = split.train_images, split.train_labels
        if arguments.validate:
            held = len(images) // 5
            model = train(name, images[held:], labels[held:], seed=arguments.seed)
            print(f"{name}: top-1 {top1(model, images[:held], labels[:held]):.2%} of {held} held-out training images")
            continue
        model = train(name, images, labels, seed=arguments.seed)
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / f"{name}.safetensors").write_bytes(save(model.state_dict()))
        print(f"{name}: top-1 {top1(model, split.test_images, split.test_labels):.2%} of 540 test images")


if __name__ == "__main__":
    main()
