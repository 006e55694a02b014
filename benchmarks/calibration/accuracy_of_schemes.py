"""Top-1 accuracy of the embedded digits models after quantization with each scheme.

    python benchmarks/calibration/accuracy_of_schemes.py
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from tqdm import tqdm

import qtk
from qtk.demo.digits import calibration_batches, evaluation_batches
from qtk.demo.models import DEMO_MODELS, build
from qtk.numerics.top1 import Top1

SCHEMES = (*qtk.SCHEMES, "tf_enhanced(variant='v1')")
WIDTHS = ((8, 8), (4, 8), (4, 4))


@torch.no_grad()
def top1(model: nn.Module) -> float:
    """Top-1 accuracy in percent."""
    counted = Top1()
    for images, labels in evaluation_batches():
        counted.add(model(images), labels)
    return 100 * (counted.share or 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DEMO_MODELS))
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    arguments = parser.parse_args()
    images = [batch for batch, _ in calibration_batches()]
    table = Table(title="top-1, %")
    for heading in ("model", "float", "scheme", *(f"W{weights}A{activations}" for weights, activations in WIDTHS)):
        table.add_column(heading, justify="left" if heading in ("model", "scheme") else "right")
    progress = tqdm(total=len(arguments.models) * len(arguments.schemes) * len(WIDTHS), unit="run")
    for name in arguments.models:
        model = build(name)
        floating = f"{top1(model):.2f}"
        prepared = qtk.prepare_model(model, images[0])
        for scheme in arguments.schemes:
            row = []
            for weight_bits, activation_bits in WIDTHS:
                sim = qtk.QuantSim(
                    prepared, images[0], scheme=scheme, weight_bits=weight_bits, activation_bits=activation_bits
                )
                sim.compute_encodings(images, progress=False)
                row.append(f"{top1(sim.model):.2f}")
                progress.update()
            table.add_row(name, floating, scheme, *row)
        table.add_section()
    progress.close()
    Console().print(table)


if __name__ == "__main__":
    main()
