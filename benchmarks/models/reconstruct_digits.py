"""Top-1 of the digits models in few bits after block reconstruction, beside the best of eight layer-wise settings.

    python benchmarks/models/reconstruct_digits.py --csv benchmarks/results/few_bits.csv
    python benchmarks/models/reconstruct_digits.py --split benchmark --cells digits_vit:4x4 digits_lstm:4x4
    python benchmarks/models/reconstruct_digits.py --split benchmark --cells digits_vit:4x4 --peers ModelOpt
    python benchmarks/models/reconstruct_digits.py --cells digits_vit:3x3 --seeds 0 1 --methods "reconstruction(drop=0)"
    python benchmarks/models/reconstruct_digits.py --cells digits_gru:3x3 --methods reconstruction training

Split ``unseen``: of every seed 512 other training images calibrate, and the figures are of the 1,285 images that were
not seen, test images and the training images left. Split ``benchmark``: the first 512 training images calibrate, in
another order with every seed, and the figures are of the 540 test images. Figures are means over the seeds. The best
setting is chosen by these figures, so that it is at least as good as any choice without them. KL is the divergence of
the scores from the float model's, in nats. A row of ``--csv`` is one run, written when it ends; what the file has is
not run again. ``training`` among the methods stands for 100 epochs of quantization-aware training on the images that
calibrate, of weights and ranges, by the float model's scores: what else these images can give. ``--peers`` adds other
toolkits by name (``few_bits_peers``), which must be installed.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from few_bits_peers import PEERS, quantized_by
from torch import Tensor, nn

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build
from qtk.report.table import Column, Table

SETTINGS = tuple((scheme, methods) for scheme in ("min_max", "activation_mse") for methods in (
    ("seq_mse", "gptq", "bias_correction"), ("seq_mse", "coordinate_descent"),
    ("seq_mse", "coordinate_descent", "bias_correction"), ("seq_mse", "adaround")))
CELLS = {
    "unseen": ("digits_cnn:2x2", "digits_gru:3x3", "digits_vit:4x4", "digits_vit:2x4", "digits_vit:3x3"),
    "benchmark": ("digits_cnn:4x4", "digits_cnn:3x3", "digits_lstm:4x4", "digits_lstm:3x3", "digits_vit:4x4",
                  "digits_vit:3x3"),
}
SAMPLES = 512
TRAINING, EPOCHS = "training", 100
PEER = "peer"
"""Stands in the place of the scheme of a run by another toolkit."""


class Run(NamedTuple):
    """What is run: one row of the file, but for its figures."""

    split: str
    model: str
    setting: str
    seed: int
    scheme: str
    methods: str


class Figures(NamedTuple):
    """What comes of a run: top-1 in percent, the divergence in nats, CPU seconds of the methods."""

    top1: float
    divergence: float
    seconds: float


FIELDS = ("split", "model", "setting", "seed", "scheme", "methods", "top-1", "KL", "CPU s")


class Digits(NamedTuple):
    """The batches that calibrate, and what the figures are of."""

    batches: list[Tensor]
    images: Tensor
    labels: Tensor


def digits(split: str, seed: int) -> Digits:
    """The images of a split; ``seed`` chooses or orders the images that calibrate."""
    data, generator = load_digits_split(), torch.Generator().manual_seed(seed)
    if split == "benchmark":
        order = torch.randperm(SAMPLES, generator=generator)
        return Digits(list(data.train_images[order].split(64)), data.test_images, data.test_labels)
    order = torch.randperm(len(data.train_images), generator=generator)
    batches, rest = list(data.train_images[order[:SAMPLES]].split(64)), order[SAMPLES:]
    return Digits(batches, torch.cat([data.test_images, data.train_images[rest]]),
                  torch.cat([data.test_labels, data.train_labels[rest]]))


def runs(arguments: argparse.Namespace) -> Iterator[Run]:
    """All runs, seed by seed."""
    learned = (("activation_mse", (each,) if each == TRAINING else ("seq_mse", "coordinate_descent", each))
               for each in arguments.methods)
    settings = (*SETTINGS, *learned, *((PEER, (each,)) for each in arguments.peers))
    for cell in arguments.cells or CELLS[arguments.split]:
        model, width = cell.split(":")
        weight_bits, activation_bits = width.split("x")
        for seed in arguments.seeds:
            for scheme, methods in settings:
                yield Run(arguments.split, model, f"W{weight_bits}A{activation_bits}", seed, scheme,
                          " + ".join(methods))


def figures(run: Run, prepared: qtk.PreparedModel) -> Figures:
    """Quantizes a model, and measures it."""
    data = digits(run.split, run.seed)
    weight_bits, activation_bits = map(int, run.setting[1:].split("A"))
    quantized: nn.Module
    if run.scheme == PEER:
        begun = time.process_time()
        quantized = quantized_by(run.methods, build(run.model), data.batches, weight_bits, activation_bits)
    else:
        sim = qtk.QuantSim(prepared, data.batches[0], scheme=run.scheme, weight_bits=weight_bits,
                           activation_bits=activation_bits)
        sim.compute_encodings(data.batches, progress=False)
        begun = time.process_time()
        if run.methods == TRAINING:
            trained(sim, build(run.model), data.batches)
        else:
            qtk.apply_layerwise(sim, data.batches, run.methods.split(" + "), progress=False)
        quantized = sim.model
    seconds = time.process_time() - begun
    with torch.no_grad():
        own, scores = quantized(data.images), build(run.model)(data.images)
    hits = (own.argmax(1) == data.labels).double().mean()
    return Figures(100 * float(hits), float(qtk.distillation_loss(own, scores)), seconds)


def trained(sim: qtk.QuantSim, teacher: nn.Module, batches: list[Tensor]) -> None:
    """Trains the weights and ranges of a simulation, which changes in place."""
    sim.learn_ranges()
    images = torch.cat(batches)
    with torch.no_grad():
        scores = teacher(images)
    optimizer = torch.optim.Adam(sim.model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(batches))
    generator = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(images), generator=generator).split(len(batches[0])):
            loss = qtk.distillation_loss(sim.model(images[chosen]), scores[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def found_in(path: Path | None) -> dict[Run, Figures]:
    """The runs of a file, which gets its heading if there is none."""
    if path is None:
        return {}
    if not path.exists():
        with path.open("w", newline="") as file:
            csv.writer(file).writerow(FIELDS)
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {Run(*row[:3], int(row[3]), *row[4:6]): Figures(*map(float, row[6:9])) for row in rows}


def table(found: dict[Run, Figures], title: str) -> Table:
    """Means over the seeds: for each cell the best of the layer-wise settings, then every other method."""
    means: dict[tuple[str, str], dict[str, Figures]] = {}
    for run in found:
        same = [each for key, each in found.items() if key._replace(seed=0) == run._replace(seed=0)]
        setting = f"{run.scheme}: {run.methods}"
        means.setdefault((run.model, run.setting), {})[setting] = Figures(*map(mean, zip(*same, strict=True)))
    rows, usual = [], {f"{scheme}: {' + '.join(methods)}" for scheme, methods in SETTINGS}
    for (model, width), cell in means.items():
        best = max(usual & cell.keys(), key=lambda each: cell[each][:1], default=None)
        for setting in cell:
            if setting == best or setting not in usual:
                top1, divergence, seconds = cell[setting]
                rows.append((model, width, setting, f"{top1:.2f}", f"{divergence:.4f}", f"{seconds:.1f}"))
    columns = (Column("model"), Column("setting"), Column("scheme: methods"), Column("top-1", number=True),
               Column("KL", number=True), Column("CPU s", number=True))
    return Table(title, columns, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=tuple(CELLS), default="unseen")
    parser.add_argument("--cells", nargs="+", help="model and bits of weights and activations, as in digits_vit:3x3")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--methods", nargs="*", default=["reconstruction"], help="the last of a chain")
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=(), help="other toolkits")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    known, found = found_in(arguments.csv), dict[Run, Figures]()
    prepared: dict[str, qtk.PreparedModel] = {}
    for run in runs(arguments):
        if run not in known:
            if run.model not in prepared:
                prepared[run.model] = qtk.prepare_model(build(run.model), load_digits_split().train_images[:64])
            known[run] = figures(run, prepared[run.model])
            print(*run, *(f"{each:.5g}" for each in known[run]), flush=True)
            if arguments.csv is not None:
                with arguments.csv.open("a", newline="") as file:
                    csv.writer(file).writerow((*run, *(f"{each:.5g}" for each in known[run])))
        found[run] = known[run]
    print(table(found, f"{arguments.split}: means of {len(arguments.seeds)} seeds").text())


if __name__ == "__main__":
    main()
