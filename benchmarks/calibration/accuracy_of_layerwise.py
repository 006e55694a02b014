"""Top-1 accuracy of the embedded digits models after each layer-wise method.

    python benchmarks/calibration/accuracy_of_layerwise.py
    python benchmarks/calibration/accuracy_of_layerwise.py --scheme activation_mse --widths 4x4 3x4
"""

from __future__ import annotations

import argparse

from accuracy_of_schemes import top1
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import qtk
from qtk.demo.digits import calibration_batches
from qtk.demo.models import DEMO_MODELS, build

METHODS = {
    "plain rounding": (),
    "SeqMSE": ("seq_mse",),
    "GPTQ": ("gptq",),
    "AdaRound": ("adaround",),
    "bias correction": ("bias_correction",),
    "SeqMSE + GPTQ": ("seq_mse", "gptq"),
    "SeqMSE + GPTQ + bias correction": ("seq_mse", "gptq", "bias_correction"),
    "SeqMSE + coordinate descent + bias correction": ("seq_mse", "coordinate_descent", "bias_correction"),
    "SeqMSE + AdaRound": ("seq_mse", "adaround"),
}
WIDTHS = ("4x8", "3x8", "4x4", "2x8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DEMO_MODELS))
    parser.add_argument("--inputs", choices=("asym", "symfp", "symqt"), default="asym")
    parser.add_argument("--scheme", default="min_max", help="of all ranges")
    parser.add_argument("--widths", nargs="+", default=WIDTHS, help="bits of weights and of activations, as in 4x8")
    arguments = parser.parse_args()
    widths = [tuple(map(int, each.split("x"))) for each in arguments.widths]
    images = [batch for batch, _ in calibration_batches()]
    table = Table(title=f"top-1, %; inputs {arguments.inputs}, ranges by {arguments.scheme}")
    for heading in ("model", "float", "method", *(f"W{weights}A{activations}" for weights, activations in widths)):
        table.add_column(heading, justify="left" if heading in ("model", "method") else "right")
    progress = tqdm(total=len(arguments.models) * len(METHODS) * len(widths), unit="run")
    for name in arguments.models:
        model = build(name)
        floating = f"{top1(model):.2f}"
        prepared = qtk.prepare_model(model, images[0])
        for title, methods in METHODS.items():
            row = []
            for weight_bits, activation_bits in widths:
                sim = qtk.QuantSim(prepared, images[0], scheme=arguments.scheme, weight_bits=weight_bits,
                                   activation_bits=activation_bits)
                sim.compute_encodings(images, progress=False)
                if methods:
                    qtk.apply_layerwise(sim, images, methods, options=qtk.LayerwiseOptions(inputs=arguments.inputs),
                                        progress=False)
                row.append(f"{top1(sim.model):.2f}")
                progress.update()
            table.add_row(name, floating, title, *row)
        table.add_section()
    progress.close()
    Console().print(table)


if __name__ == "__main__":
    main()
