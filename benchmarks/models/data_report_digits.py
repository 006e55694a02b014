"""Is calibration data enough? Recommended sizes against top-1, planted odd batches, and data that were made.

    python benchmarks/models/data_report_digits.py [--models digits_vit] [--parts sizes odd made]

``sizes``: the number of batches that ``sim.data_report`` recommends, beside the number from which on top-1 of the 540
test images is as with all batches, to two images; None, more than there are, counts as all. ``odd``: one batch of
twelve is changed, in twenty ways; batches named, and batches named wrongly with and without it. ``made``: W8A8 from
``qtk.synthetic_batches`` alone.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS, build
from qtk.report.table import Column, Table

SPLIT = load_digits_split()
IMAGES = 2 / 540
"""Two images: what top-1 may change by chance."""


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "× 255": lambda x: 255 * x, "× 16": lambda x: 16 * x, "× 4": lambda x: 4 * x, "× 2": lambda x: 2 * x,
    "/ 255": lambda x: x / 255, "/ 4": lambda x: x / 4, "/ 2": lambda x: x / 2,
    "+ 1": lambda x: x + 1, "- 0.5": lambda x: x - 0.5, "normalized": lambda x: (x - 0.3) / 0.38,
    "inverted": lambda x: 1 - x, "zeros": torch.zeros_like, "ones": torch.ones_like,
    "uniform noise": lambda x: torch.rand(x.shape, generator=generator()),
    "normal noise": lambda x: torch.randn(x.shape, generator=generator()),
    "noise added": lambda x: x + 0.3 * torch.randn(x.shape, generator=generator()),
    "one image": lambda x: x[:1].expand_as(x), "transposed, inverted": lambda x: 1 - x.transpose(2, 3),
    "pixels shuffled": lambda x: x.flatten(2)[..., torch.randperm(64, generator=generator())].view_as(x),
    "one hot pixel": lambda x: torch.where(torch.arange(64).view(8, 8) == 27, torch.tensor(20.0), x),
}


def top1(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model(SPLIT.test_images).argmax(1) == SPLIT.test_labels).double().mean())


def sizes(name: str, bits: int, batch_size: int, seed: int) -> tuple[str, ...]:
    order = torch.randperm(len(SPLIT.train_images), generator=torch.Generator().manual_seed(seed))
    batches = list(SPLIT.train_images[order].split(batch_size)[:43])
    sim = qtk.QuantSim(build(name), batches[0], activation_bits=bits)
    report = sim.data_report(batches, progress=False)
    found = []
    for size in report.sizes:
        trial = copy.deepcopy(sim)
        trial.compute_encodings(batches[:size.batches], progress=False)
        found.append(top1(trial.model))
    moving = [index for index, each in enumerate(found) if abs(each - found[-1]) > IMAGES + 1e-9]
    first = report.sizes[moving[-1] + 1 if moving else 0].batches
    shown = " ".join(f"{each:.1%}" for each in found)
    ratio = f"{(report.recommended or report.sizes[-1].batches) / first:g}"
    return name, f"A{bits}", f"{batch_size}", str(report.recommended), str(first), ratio, shown


def odd(name: str) -> tuple[str, ...]:
    found, wrong, missed = 0, 0, []
    clean = list(SPLIT.train_images.split(32)[:12])
    sim = qtk.QuantSim(build(name), clean[0])
    falsely = 0
    for start in range(0, 36, 12):
        falsely += len(sim.data_report(list(SPLIT.train_images.split(32)[start:start + 12]), progress=False).odd)
    for index, (kind, change) in enumerate(ODD.items()):
        batches = list(clean)
        at = index % len(batches)
        batches[at] = change(batches[at])
        named = [each.index for each in sim.data_report(batches, progress=False).odd]
        found += at in named
        wrong += len([each for each in named if each != at])
        missed += [] if at in named else [kind]
    return name, f"{found} of {len(ODD)}", str(wrong), str(falsely), ", ".join(missed)


def made(name: str) -> tuple[str, ...]:
    model = build(name)
    real = SPLIT.train_images[:256].split(64)
    results = []
    for batches in (real, qtk.synthetic_batches(model, real[0], num_batches=4, batch_size=64)):
        sim = qtk.QuantSim(model, real[0])
        sim.compute_encodings(batches, progress=False)
        results.append(top1(sim.model))
    return name, f"{top1(model):.2%}", *(f"{each:.2%}" for each in results)


PARTS = {
    "sizes": ("recommended batches", ("model", "activations", "batch size", "recommended", "top-1 stays from", "ratio",
                                      "top-1 by size")),
    "odd": ("planted batches", ("model", "named", "others named beside it", "named of 36 without", "missed")),
    "made": ("W8A8 without data", ("model", "float", "256 images", "synthetic")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DEMO_MODELS))
    parser.add_argument("--parts", nargs="+", default=list(PARTS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for part in arguments.parts:
        rows = []
        for name in arguments.models:
            if part == "sizes":
                runs = [partial(sizes, name, bits, *data) for bits in (4, 8) for data in ((8, 0), (16, 1))]
            else:
                runs = [partial({"odd": odd, "made": made}[part], name)]
            for run in runs:
                rows.append(run())
                print(*rows[-1], flush=True)
        title, headings = PARTS[part]
        print(Table(title, tuple(map(Column, headings)), tuple(rows)).text())


if __name__ == "__main__":
    main()
