"""Output error of layer-wise methods on data like and unlike the calibration data, in parts of plain rounding's.

A small transformer reads handwritten digits as sequences of rows; it is trained here, on all ten. Weights are
quantized by data of the digits 0 to 4 alone; errors are those of the scores, on test images of 0 to 4 (alike) and 5 to
9 (unlike).

    OMP_NUM_THREADS=1 python benchmarks/calibration/unlike_data.py --csv unlike.csv
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from turns import commit, write_csv

import qtk
from qtk.demo.digits import load_digits_split

CHAINS: dict[str, tuple[str, ...]] = {
    "SeqMSE": ("seq_mse",),
    "GPTQ": ("gptq",),
    "SeqMSE + GPTQ": ("seq_mse", "gptq"),
    "coordinate descent": ("coordinate_descent",),
    "SeqMSE + coordinate descent": ("seq_mse", "coordinate_descent"),
}
WITHOUT_HOLDOUT = "GPTQ, holdout=0"
GRANULARITIES = ("channel", "128", "32")


class DigitRows(nn.Module):
    """A transformer encoder over the eight rows of an image."""

    def __init__(self, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(0.02 * torch.randn(8, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1, 2)) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


def trained(images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    model = DigitRows()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    for _ in tqdm(range(epochs), desc="training", leave=False):
        for chunk in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chunk]), labels[chunk]).backward()
            optimizer.step()
    return model.eval()


def config_of(granularity: str) -> dict[str, object]:
    weight: dict[str, object] = {"symmetric": True, "granularity": "per_channel"}
    config: dict[str, object] = {"version": 1, "defaults": {"weight": weight, "bias": "float"}}
    if granularity != "channel":
        blocks = {"granularity": "per_block", "block_size": int(granularity)}
        config["rules"] = [{"match": {"path": "blocks.*"}, "weight": blocks}]
    return config


@torch.no_grad()
def error(sim: qtk.QuantSim, model: nn.Module, images: Tensor) -> float:
    return float((sim.model(images) - model(images)).square().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3, 2])
    parser.add_argument("--granularities", nargs="+", default=list(GRANULARITIES), choices=GRANULARITIES)
    parser.add_argument("--samples", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--csv", type=Path, help="file to write")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # few samples are the point
    digits = load_digits_split()
    model = trained(digits.train_images, digits.train_labels, arguments.epochs)
    judged = digits.test_images[digits.test_labels < 5], digits.test_images[digits.test_labels >= 5]
    known = digits.train_images[digits.train_labels < 5]
    rows: list[dict[str, object]] = []
    total = len(arguments.bits) * len(arguments.granularities) * len(arguments.samples)
    for case in tqdm(range(total), unit="case"):
        index, count = divmod(case, len(arguments.samples))
        bits, granularity = divmod(index, len(arguments.granularities))
        batches = known[: arguments.samples[count]].split(64)
        setting = {"bits": arguments.bits[bits], "granularity": arguments.granularities[granularity],
                   "samples": arguments.samples[count]}
        plain: tuple[float, ...] = ()
        for chain, methods in {"nearest": (), WITHOUT_HOLDOUT: ("gptq",), **CHAINS}.items():
            sim = qtk.QuantSim(model, batches[0], weight_bits=arguments.bits[bits], activation_bits=None,
                               config=config_of(arguments.granularities[granularity]))
            sim.compute_encodings(None, progress=False)
            if methods:
                holdout = 0.0 if chain == WITHOUT_HOLDOUT else 0.2
                qtk.apply_layerwise(sim, batches, methods, holdout=holdout, progress=False)
            errors = tuple(error(sim, model, images) for images in judged)
            plain = plain or errors
            rows.append({**setting, "chain": chain, "alike": errors[0] / plain[0], "unlike": errors[1] / plain[1]})
        tqdm.write(", ".join(str(value) for value in setting.values()) + ": " + ", ".join(
            f"{row['chain']} {row['alike']:.3f} / {row['unlike']:.3f}" for row in rows[-1 - len(CHAINS) :]))
    table = Table(title="squared error of the scores, plain rounding is 1: alike / unlike")
    chains = [WITHOUT_HOLDOUT, *CHAINS]
    for heading in ("bits", "blocks", "samples", *chains):
        table.add_column(heading, justify="right")
    for case in range(total):
        own = rows[case * (len(chains) + 1) : (case + 1) * (len(chains) + 1)]
        cells = [f"{row['alike']:.3f} / {row['unlike']:.3f}" for row in own[1:]]
        table.add_row(*(str(own[0][key]) for key in ("bits", "granularity", "samples")), *cells)
    Console(width=150).print(table)
    if arguments.csv:
        write_csv(arguments.csv, {"commit": commit(), "torch": torch.__version__}, rows)


if __name__ == "__main__":
    main()
