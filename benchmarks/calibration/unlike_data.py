"""Output error of layer-wise methods on data like and unlike the calibration data, in parts of plain rounding's.

A small transformer reads handwritten digits as sequences; it is trained here, on all ten. Weights are quantized by data
of the digits 0 to 4 alone; errors are those of the scores, on test images of 0 to 4 (alike) and 5 to 9 (unlike).
Sequences are the eight rows of an image, or with ``--padded`` its patches that are not blank, padded to 16 tokens, of
which calibration counts the real ones (``valid``).

    OMP_NUM_THREADS=1 python benchmarks/calibration/unlike_data.py --padded --csv unlike.csv
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

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
    "AdaRound": ("adaround",),
    "SeqMSE + AdaRound": ("seq_mse", "adaround"),
}
JUDGED = "SeqMSE + coordinate descent, judged"
"""The chain of these two, or one of them alone, whichever leaves the scores of held-out samples closest to float."""
WITHOUT_HOLDOUT = "GPTQ, holdout=0"
GRANULARITIES = ("channel", "128", "32")


class Tokens(NamedTuple):
    """Sequences of tokens, and which tokens are real. Shape: x [samples, tokens, features], mask [samples, tokens]."""

    x: Tensor
    mask: Tensor | None = None

    def batches(self, size: int) -> list[tuple[Tensor, ...]]:
        parts = [part.split(size) for part in self if part is not None]
        return list(zip(*parts, strict=True))


def rows(images: Tensor) -> Tokens:
    """The eight rows of every image, each with its index. Shape: [samples, 8, 9]."""
    x = images.flatten(1, 2)
    places = torch.linspace(-1, 1, 8).expand(len(x), 8)
    return Tokens(torch.cat([x, places[..., None]], -1))


def patches(images: Tensor) -> Tokens:
    """The 2 × 2 patches with ink, each with its row and column, padded with zeros. Shape: [samples, 16, 6]."""
    cut = images.flatten(1, 2).unflatten(1, (4, 2)).unflatten(3, (4, 2)).transpose(2, 3).reshape(len(images), 16, 4)
    place = torch.cartesian_prod(torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4)).expand(len(cut), 16, 2)
    ink = cut.amax(-1) > cut.amin()
    order = (~ink).to(torch.int8).argsort(dim=1, stable=True)  # the real ones first
    mask = ink.gather(1, order)
    x = torch.cat([cut, place], -1).gather(1, order[..., None].expand(-1, -1, 6))
    return Tokens(x * mask[..., None], mask)


class DigitReader(nn.Module):
    """A transformer encoder over the tokens of an image."""

    def __init__(self, features: int, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, None if mask is None else mask[:, None, None, :])
        x = self.norm(x)
        if mask is None:
            return self.head(x.mean(1))
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


def trained(data: Tokens, labels: Tensor, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    model = DigitReader(data.x.shape[-1])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    for _ in tqdm(range(epochs), desc="training", leave=False):
        for chunk in torch.randperm(len(labels)).split(64):
            optimizer.zero_grad()
            scores = model(*(part[chunk] for part in data if part is not None))
            nn.functional.cross_entropy(scores, labels[chunk]).backward()
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
def error(sim: qtk.QuantSim, model: nn.Module, batch: tuple[Tensor, ...]) -> float:
    return float((sim.model(*batch) - model(*batch)).square().sum())


def print_misses(results: list[dict[str, object]]) -> None:
    """Names the cells above plain rounding, and those that keep less than 90 % of GPTQ's gain on alike data."""
    gains: dict[str, float] = {}
    for row in results:
        cell = f"W{row['bits']}, {row['granularity']}, {row['samples']} samples, {row['chain']}"
        if max(float(row["alike"]), float(row["unlike"])) > 1:
            print(f"above plain rounding: {cell}: {row['alike']:.3f} / {row['unlike']:.3f}")
        if row["chain"] == WITHOUT_HOLDOUT:
            gain = 1 - float(row["alike"])
        elif row["chain"] != "nearest":
            kept = (1 - float(row["alike"])) / gain
            gains[str(row["chain"])] = min(kept, gains.get(str(row["chain"]), kept))
    print("least share of the gain of GPTQ without held-out data, alike: "
          + ", ".join(f"{chain} {kept:.1%}" for chain, kept in gains.items()))
    judged = [row for row in results if row["chain"] not in (WITHOUT_HOLDOUT, "nearest")]
    worst = max(judged, key=lambda row: float(row["unlike"]))
    print(f"worst cell: W{worst['bits']}, {worst['granularity']}, {worst['samples']} samples, {worst['chain']}: "
          f"{worst['alike']:.3f} / {worst['unlike']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3, 2])
    parser.add_argument("--granularities", nargs="+", default=list(GRANULARITIES), choices=GRANULARITIES)
    parser.add_argument("--samples", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--padded", action="store_true", help="patches with ink, padded, in place of rows")
    parser.add_argument("--chains", nargs="+", default=[*CHAINS, JUDGED], choices=[*CHAINS, JUDGED])
    parser.add_argument("--csv", type=Path, help="file to write")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # few samples are the point
    digits = load_digits_split()
    tokens, valid = (patches, "mask") if arguments.padded else (rows, None)
    seen = tokens(digits.train_images)
    model = trained(seen, digits.train_labels, arguments.epochs)
    test = tokens(digits.test_images)
    with torch.no_grad():
        (whole,) = test.batches(len(test.x))
        hits = (model(*whole).argmax(1) == digits.test_labels).float().mean()
    real = "" if test.mask is None else f", {test.mask.float().mean():.0%} of the tokens real"
    print(f"float accuracy {hits:.1%}{real}")
    judged = [tokens(digits.test_images[of]).batches(len(digits.test_images))[0]
              for of in (digits.test_labels < 5, digits.test_labels >= 5)]
    known = digits.train_images[digits.train_labels < 5]
    results: list[dict[str, object]] = []
    total = len(arguments.bits) * len(arguments.granularities) * len(arguments.samples)
    for case in tqdm(range(total), unit="case"):
        index, count = divmod(case, len(arguments.samples))
        bits, granularity = divmod(index, len(arguments.granularities))
        batches = tokens(known[: arguments.samples[count]]).batches(64)
        setting = {"bits": arguments.bits[bits], "granularity": arguments.granularities[granularity],
                   "samples": arguments.samples[count]}
        plain: tuple[float, ...] = ()
        chains = {**CHAINS, JUDGED: CHAINS["SeqMSE + coordinate descent"]}
        chains = {chain: chains[chain] for chain in arguments.chains}
        for chain, methods in {"nearest": (), WITHOUT_HOLDOUT: ("gptq",), **chains}.items():
            sim = qtk.QuantSim(model, batches[0], weight_bits=arguments.bits[bits], activation_bits=None,
                               config=config_of(arguments.granularities[granularity]))
            sim.compute_encodings(None, progress=False)
            if methods:
                options = qtk.LayerwiseOptions(
                    holdout=0.0 if chain == WITHOUT_HOLDOUT else 0.2, judge_parts=chain == JUDGED)
                qtk.apply_layerwise(sim, batches, methods, options=options, valid=valid, progress=False)
            errors = tuple(error(sim, model, images) for images in judged)
            plain = plain or errors
            results.append({**setting, "chain": chain, "alike": errors[0] / plain[0], "unlike": errors[1] / plain[1]})
        tqdm.write(", ".join(str(value) for value in setting.values()) + ": " + ", ".join(
            f"{row['chain']} {row['alike']:.3f} / {row['unlike']:.3f}" for row in results[-1 - len(chains) :]))
    table = Table(title="squared error of the scores, plain rounding is 1: alike / unlike")
    shown = [WITHOUT_HOLDOUT, *arguments.chains]
    for heading in ("bits", "blocks", "samples", *shown):
        table.add_column(heading, justify="right")
    for case in range(total):
        own = results[case * (len(shown) + 1) : (case + 1) * (len(shown) + 1)]
        cells = [f"{row['alike']:.3f} / {row['unlike']:.3f}" for row in own[1:]]
        table.add_row(*(str(own[0][key]) for key in ("bits", "granularity", "samples")), *cells)
    Console(width=200).print(table)
    print_misses(results)
    if arguments.csv:
        write_csv(arguments.csv, {"commit": commit(), "torch": torch.__version__}, results)


if __name__ == "__main__":
    main()
