"""``qtk diff`` of planted differences: is each named, is nothing else, and are equal folders without a difference?

    python benchmarks/models/planted_diffs.py [--models digits_vit] [--each 10]

In copies of a calibrated W8A8 simulation the scale of one site is multiplied by 1.01 or by 2, or one float of a bias
or of a norm is moved by 1 %; both are written by ``sim.save`` and the folders are compared. *Found*: the planted name
and the sites that share its encoding are all that the difference names. *Equal*: differences of two folders of the same
simulation.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import torch

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS, build
from qtk.report.table import Column, Table


def named(folder: Path, changed: qtk.QuantSim) -> list[str]:
    """The names that differ between the folder and a simulation that is written beside it."""
    with tempfile.TemporaryDirectory() as other:
        changed.save(Path(other) / "changed")
        return [each.site for each in qtk.diff(folder, Path(other) / "changed").sites]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DEMO_MODELS))
    parser.add_argument("--each", type=int, default=10)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    batches = list(load_digits_split().train_images[:128].split(64))
    draw, rows = random.Random(0), []
    for name in arguments.models:
        sim = qtk.QuantSim(build(name), batches[0])
        sim.compute_encodings(batches, progress=False)
        own = [site.name for site, plan in sim.plan.items() if plan.leader is None and plan.factors is None]
        floats = [each for each, value in sim.model.named_parameters() if each not in sim.quantizers]
        scales = parameters = 0
        chosen = draw.sample(own, min(arguments.each, len(own))), draw.sample(floats, min(arguments.each, len(floats)))
        with tempfile.TemporaryDirectory() as folder:
            first = Path(folder) / "first"
            sim.save(first)
            for index, site in enumerate(chosen[0]):
                changed, encoding = copy.deepcopy(sim), sim.encodings()[site]
                factor = (1.01, 2.0)[index % 2]
                changed.quantizers[site].load_encoding(replace(encoding, scale=encoding.scale * factor))
                sharing = [each.name for each, plan in sim.plan.items() if (plan.leader or each).name == site]
                scales += named(first, changed) == sharing
            for parameter in chosen[1]:
                changed = copy.deepcopy(sim)
                with torch.no_grad():
                    value = changed.model.get_parameter(parameter).view(-1)
                    value[0] += 0.01 * value.abs().max()
                parameters += named(first, changed) == [parameter]
            equal = len(named(first, sim))
        rows.append((name, f"{scales} of {len(chosen[0])}", f"{parameters} of {len(chosen[1])}", str(equal)))
        print(*rows[-1], flush=True)
    columns = (Column("model"), Column("planted scales found"), Column("planted float parameters found"),
               Column("differences of equal folders", number=True))
    print(Table("qtk diff", columns, tuple(rows)).text())


if __name__ == "__main__":
    main()
