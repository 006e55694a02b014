"""Top-1 of the digits models in few bits after block reconstruction, beside the best of eight layer-wise settings.

    python benchmarks/models/reconstruct_digits.py
    python benchmarks/models/reconstruct_digits.py --models digits_vit --widths 3x3 --seeds 0 1

Of every seed 512 other training images calibrate; the figures are of the images that were not seen, test images and
the training images left, and means over the seeds. The best setting is chosen by these figures, so that it is at
least as good as any choice without them. KL is the divergence of the scores from the float model's, in nats. A row
of ``--csv`` is one run, written when it ends; of the 540 test images it has the top-1, too.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build
from qtk.report.table import Column, Table

SETTINGS = tuple((scheme, methods) for scheme in ("min_max", "activation_mse") for methods in (
    ("seq_mse", "gptq", "bias_correction"), ("seq_mse", "coordinate_descent"),
    ("seq_mse", "coordinate_descent", "bias_correction"), ("seq_mse", "adaround")))
WIDTHS = {"digits_vit": ("3x3", "2x4", "4x4"), "digits_cnn": ("2x2", "4x4"), "digits_gru": ("3x3",),
          "digits_lstm": ("4x4",)}
FIELDS = ("model", "setting", "seed", "scheme", "methods", "top-1, unseen", "KL, unseen", "top-1, 540 test images",
          "CPU s")


def figures(model: nn.Module, images: Tensor, labels: Tensor, scores: Tensor) -> tuple[float, float, float]:
    """Top-1 in percent, the divergence from the float model's scores, and top-1 of the test images, the first 540."""
    with torch.no_grad():
        own = model(images)
    hits = 100 * (own.argmax(1) == labels).double()
    return float(hits.mean()), float(qtk.distillation_loss(own, scores)), float(hits[:540].mean())


def write(path: Path, row: tuple[object, ...]) -> None:
    """Appends a row to a file, which gets its heading first."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([FIELDS, row] if is_new else [row])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(WIDTHS))
    parser.add_argument("--widths", nargs="+", help="bits of weights and of activations, as in 3x3")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--method", default="reconstruction")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    split, rows = load_digits_split(), []
    for name in arguments.models:
        model = build(name)
        prepared = qtk.prepare_model(model, split.train_images[:64])
        for width in arguments.widths or WIDTHS[name]:
            weight_bits, activation_bits = map(int, width.split("x"))
            found: dict[tuple[str, ...], list[tuple[float, ...]]] = {}
            for seed in arguments.seeds:
                order = torch.randperm(len(split.train_images), generator=torch.Generator().manual_seed(seed))
                batches = list(split.train_images[order[:512]].split(64))
                images = torch.cat([split.test_images, split.train_images[order[512:]]])
                labels = torch.cat([split.test_labels, split.train_labels[order[512:]]])
                with torch.no_grad():
                    scores = model(images)
                for scheme, methods in (
                    *SETTINGS, ("activation_mse", ("seq_mse", "coordinate_descent", arguments.method))):
                    sim = qtk.QuantSim(prepared, batches[0], scheme=scheme, weight_bits=weight_bits,
                                       activation_bits=activation_bits)
                    sim.compute_encodings(batches, progress=False)
                    begun = time.process_time()
                    qtk.apply_layerwise(sim, batches, methods, progress=False)
                    seconds = time.process_time() - begun
                    row = (*figures(sim.model, images, labels, scores), seconds)
                    found.setdefault((scheme, *methods), []).append(row)
                    if arguments.csv is not None:
                        write(arguments.csv, (name, f"W{weight_bits}A{activation_bits}", seed, scheme,
                                              " + ".join(methods), *(f"{each:.5g}" for each in row)))
                last = [results[-1] for results in found.values()]
                print(f"{name} W{weight_bits}A{activation_bits} seed {seed}: best {max(last[:-1])}, reconstruction "
                      f"{last[-1]}", flush=True)
            means = {setting: [sum(each) / len(each) for each in zip(*results, strict=True)]
                     for setting, results in found.items()}
            learned = means.popitem()[1]
            setting = max(means, key=lambda each: means[each][0])
            rows.append((name, f"W{weight_bits}A{activation_bits}", " + ".join(setting), f"{means[setting][0]:.2f}",
                         f"{learned[0]:.2f}", f"{means[setting][1]:.4f}", f"{learned[1]:.4f}", f"{learned[2]:.2f}",
                         f"{learned[3]:.0f}"))
    columns = (Column("model"), Column("setting"), Column("best of the layer-wise settings"),
               Column("its top-1", number=True), Column("reconstruction", number=True), Column("its KL", number=True),
               Column("reconstruction", number=True), Column("540 test images", number=True),
               Column("CPU s", number=True))
    print(Table(f"{arguments.method}: unseen images, means of {len(arguments.seeds)} seeds", columns,
                tuple(rows)).text())


if __name__ == "__main__":
    main()
