"""``qtk.quantize`` on the digits models: what it takes to lose at most one point, and how long it looks for it.

    python benchmarks/models/quantize_digits.py [--models digits_vit] [--bits 4 8] [--target default]

Calibrated with 512 training images, judged by every other test image; the accuracies are of the remaining ones.
``digits_bert`` is trained first (digits_bert.py): two channels of its residual sums are about ±60, the others up to 16.
"""

from __future__ import annotations

import argparse
import time

import torch
from digits_bert import tokens, trained_bert
from torch import Tensor, nn

import qtk
from qtk.demo.digits import DigitsSplit, load_digits_split
from qtk.demo.models import build
from qtk.report.table import Column, Table

MODELS = ("digits_cnn", "digits_vit", "digits_lstm", "digits_gru", "digits_vit with outliers",
          "digits_bert with outliers")


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def outliers(model: nn.Module, factor: float = 30.0) -> nn.Module:
    """Scales one channel in eight of every layer norm up, and the weights that read it down: the same function."""
    modules = dict(model.named_modules())
    for name, norm in modules.items():
        if isinstance(norm, nn.LayerNorm) and (reader := _reader(modules, name)) is not None:
            with torch.no_grad():
                norm.weight[::8] *= factor
                norm.bias[::8] *= factor
                reader[:, ::8] /= factor
    return model


def _reader(modules: dict[str, nn.Module], norm: str) -> Tensor | None:
    """The weight that multiplies what a norm gives, by the order of the modules of a block."""
    names = list(modules)
    for name in names[names.index(norm) + 1:]:
        if isinstance(modules[name], nn.Linear) and modules[name].in_features == modules[norm].normalized_shape[0]:
            return modules[name].weight
        if isinstance(modules[name], nn.LayerNorm):
            return None
    return None


def model_and_inputs(name: str, split: DigitsSplit) -> tuple[nn.Module, Tensor, Tensor]:
    """The trained model, its inputs to calibrate with, and those to test with."""
    if name == "digits_bert with outliers":
        return trained_bert(split, outliers=60.0), tokens(split.train_images[:512]), tokens(split.test_images)
    model = build(name.split()[0]).eval()
    if "outliers" in name:
        with torch.no_grad():
            before = model(split.test_images)
            assert torch.allclose(before, outliers(model)(split.test_images), atol=1e-3)
    return model, split.train_images[:512], split.test_images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--bits", nargs="+", type=int, default=[8, 4])
    parser.add_argument("--target", default="onnxruntime")
    arguments = parser.parse_args()
    split = load_digits_split()
    rows = []
    for name in arguments.models:
        model, calibration, images = model_and_inputs(name, split)
        batches = list(calibration.split(64))
        in_float = accuracy(model, images[1::2], split.test_labels[1::2])
        for bits in arguments.bits:
            def top1(model: nn.Module, images: Tensor = images) -> float:
                return accuracy(model, images[::2], split.test_labels[::2])

            begun = time.monotonic()
            sim, account = qtk.quantize(model, batches, target=arguments.target, evaluate=top1, max_drop=0.01,
                                        weight_bits=bits, activation_bits=bits, progress=False)
            seconds = time.monotonic() - begun
            print(f"\n{name} W{bits}A{bits}\n{account}", flush=True)
            rows.append((name, f"W{bits}A{bits}", f"{in_float:.2%}",
                         f"{accuracy(sim.model, images[1::2], split.test_labels[1::2]):.2%}",
                         "yes" if account.reached else "no", account.best.step if account.best else "–",
                         f"{seconds / account.trials[0].seconds:.1f} ×"))
    columns = (Column("model"), Column("setting"), Column("float", number=True), Column("quantized", number=True),
               Column("drop met"), Column("last step kept"), Column("time, × plain calibration", number=True))
    print(Table(f"qtk.quantize on test images, target {arguments.target}", columns, tuple(rows)).text())


if __name__ == "__main__":
    main()
