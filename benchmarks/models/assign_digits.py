"""``qtk.assign_bits`` on the digits models: as many bytes as with equal widths, and what it is worth.

For each model the bytes of weights in 6 bits are the budget (activations in 8), and the widths to choose from are 4 and
8 bits, or 3 to 8; with activations in the search, the bit operations of 6 x 6 are, of 4, 6 and 8 bits. Judged by
the test images, which neither calibration nor the search see: accuracy, and SQNR of the outputs.

    python benchmarks/models/assign_digits.py [--models digits_vit] [--target default]
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import nn

import qtk
from qtk.analysis.float_outputs import FloatOutputs, sqnr_db
from qtk.auto.matrix_products import matrix_products
from qtk.auto.widths import FLOAT_BITS
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build
from qtk.report.table import Column, Table

MODELS = ("digits_cnn", "digits_vit", "digits_lstm", "digits_gru")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--target", default="default")
    arguments = parser.parse_args()
    split = load_digits_split()
    batches, rows = list(split.train_images[:512].split(64)), []
    for name in arguments.models:
        model = build(name).eval()
        judge = FloatOutputs(model, [split.test_images], None)

        def result(sim: nn.Module, judge: FloatOutputs = judge) -> tuple[str, str]:
            with torch.no_grad():
                right = sim(split.test_images).argmax(1) == split.test_labels
            return f"{right.double().mean():.2%}", f"{sqnr_db(judge.error(sim)):.1f}"

        def simulation(bits: int, activations: int, model: nn.Module = model) -> qtk.QuantSim:
            sim = qtk.QuantSim(model, batches[0], config=arguments.target, weight_bits=bits,
                               activation_bits=activations)
            sim.compute_encodings(batches, progress=False)
            return sim

        def add(budget: str, widths: str, cost: float, sim: qtk.QuantSim, seconds: float, name: str = name) -> None:
            rows.append((name, budget, widths, f"{cost:,.4g}", *result(sim.model), f"{seconds:.0f}"))

        for unit, activations, choices in (("weight_bits", 8, ((4, 8), (3, 4, 5, 6, 7, 8))),
                                           ("bit_operations", None, ((4, 6, 8),))):
            limit = 6.0
            for bits in (4, 6, 8):
                sim = simulation(bits, activations or bits)
                cost = float(bits) if unit == "weight_bits" else operations(sim, batches[0])
                limit = cost if bits == 6 else limit
                add(unit, f"all {bits}", cost, sim, 0.0)
            for of in choices:
                sim, started = simulation(8, activations or 8), time.perf_counter()
                found = qtk.assign_bits(sim, batches, budget={unit: limit}, choices=of, progress=False)
                add(unit, f"of {', '.join(map(str, of))}", found.cost, sim, time.perf_counter() - started)
    headings = ("model", "budget", "widths", "cost", "accuracy", "SQNR, dB", "s")
    print(Table("widths under a budget", tuple(Column(each, number=index > 2) for index, each in enumerate(headings)),
                tuple(rows)).text())


def operations(sim: qtk.QuantSim, x: torch.Tensor) -> float:
    """Bit operations of a simulation, for one input."""
    plan = sim.plan
    return sum(
        each.multiplications * math.prod(FLOAT_BITS if site is None else plan[site].spec.dtype.bits
                                         for site in each.operands)
        for each in matrix_products(sim.simulation, lambda: sim.model(x)))


if __name__ == "__main__":
    main()
