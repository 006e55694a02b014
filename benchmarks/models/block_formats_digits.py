"""Top-1 of the digits models with weights and activations in block formats, of 4-bit integers beside them.

    python benchmarks/models/block_formats_digits.py
    python benchmarks/models/block_formats_digits.py --models digits_vit --formats nvfp4 mxfp4

512 training images calibrate; top-1 is of the 540 test images, one of them is 0.19 %. Products in front of which no
block fits have their weights in float (``remainder: float``).
"""

from __future__ import annotations

import argparse
import warnings

import torch

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build
from qtk.report.table import Column, Table

FORMATS = ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxint8")
STEPS = ("", "smooth_quant", "seq_mse", "smooth_quant + seq_mse")


def simulation(name: str, format: str, steps: str, batches: list[torch.Tensor]) -> qtk.QuantSim:
    """The calibrated simulation of a digits model."""
    config = {"version": 1, "defaults": {"weight": {"dtype": format, "remainder": "float"},
                                         "activation": {"dtype": format}},
              "rules": [{"match": {"op": ["layer_norm", "batch_norm"]}, "weight": "float", "optional": True}]}
    model = build(name)
    sim = (qtk.QuantSim(model, batches[0], weight_bits=4, activation_bits=4) if format == "int4"
           else qtk.QuantSim(model, batches[0], config=config))
    if "smooth_quant" in steps:
        qtk.apply_smooth_quant(sim, batches, progress=False)
    sim.compute_encodings(batches, progress=False)
    if "seq_mse" in steps:
        qtk.apply_seq_mse(sim, batches, progress=False)
    return sim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["digits_vit", "digits_cnn", "digits_gru"])
    parser.add_argument("--formats", nargs="+", default=[*FORMATS, "int4"])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    split, rows = load_digits_split(), []
    batches = list(split.train_images[:512].split(64))
    for name in arguments.models:
        for format in arguments.formats:
            cells = []
            for steps in STEPS:
                sim = simulation(name, format, steps, batches)
                with torch.no_grad():
                    hits = sim.model(split.test_images).argmax(1) == split.test_labels
                cells.append(f"{100 * float(hits.double().mean()):.2f}")
            rows.append((name, format, *cells))
            print(*rows[-1], flush=True)
    columns = (Column("model"), Column("format"), *(Column(steps or "rounded", number=True) for steps in STEPS))
    print(Table("weights and activations in block formats: top-1, %", columns, tuple(rows)).text())


if __name__ == "__main__":
    main()
