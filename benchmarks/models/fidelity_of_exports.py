"""How closely ONNX Runtime computes what the simulation does: the zoo, the trained digits models, 20 of timm.

Per model the verdict of ``verify_export``. With the optimizations off, a difference is a sum in another order, of which
a value on a rounding edge makes one step. With the default optimizations float operators are fused too, and in deep
models such steps add up; "first to differ" is the first quantized value in graph order that is not the simulation's, of
files whose fusions do not change when it is returned. Weights of timm's models are random, those of the digits models
trained.

    python benchmarks/models/fidelity_of_exports.py --csv figures.csv
    python benchmarks/models/fidelity_of_exports.py --models digits_vit linear_relu resnet18
"""

from __future__ import annotations

import argparse
import csv
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import onnxruntime
import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS
from qtk.demo.models import build as build_demo
from qtk.export.onnx.session import integer_sums_saturate
from qtk.report.verdict import EXACT, OFF, ON, Verdict
from tests.zoo.models import ZOO
from tests.zoo.prepared import simulated

TIMM = (
    "resnet18", "resnet50", "mobilenetv2_100", "mobilenetv3_small_100", "efficientnet_b0", "regnety_002", "densenet121",
    "convnext_atto", "repvgg_a0", "repvit_m0_9", "mixer_s32_224", "vit_tiny_patch16_224", "deit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224", "xcit_nano_12_p16_224", "cait_xxs24_224", "crossvit_tiny_240", "mobilevitv2_050",
    "coatnet_nano_rw_224", "maxvit_nano_rw_256",
)
WITHIN_ONE_STEP, DEEP_DB, TOP1, EXACT_MODE_GAIN_DB = 0.999, 35.0, 0.995, 1.0
"""Targets: values within one step with the optimizations off; SQNR and top-1 of trained models with the default ones;
by how many dB the exact x86 mode may be better."""


@dataclass(frozen=True)
class Fidelity:
    """One model's file against its simulation; off, on: without and with ONNX Runtime's default optimizations."""

    model: str
    off_differing: float
    off_beyond_one_step: float | None
    on_differing: float
    on_beyond_one_step: float | None
    on_sqnr_db: float
    exact_mode_sqnr_db: float
    top1: float | None
    first_to_differ: str
    is_trained: bool

    def missed(self) -> Iterator[str]:
        """The targets it does not reach."""
        beyond = self.off_differing if self.off_beyond_one_step is None else self.off_beyond_one_step
        if beyond > 1 - WITHIN_ONE_STEP:
            yield f"{beyond:.2%} of the values off by more than one step without optimizations"
        if self.is_trained and self.on_sqnr_db < DEEP_DB:
            yield f"{self.on_sqnr_db:.1f} dB"
        if self.is_trained and self.top1 is not None and self.top1 < TOP1:
            yield f"top-1 agreement {self.top1:.2%}"
        if self.exact_mode_sqnr_db - self.on_sqnr_db > EXACT_MODE_GAIN_DB:
            yield f"{self.exact_mode_sqnr_db - self.on_sqnr_db:.1f} dB better in exact x86 mode"


def fidelity(name: str, verdict: Verdict, *, is_trained: bool) -> Fidelity:
    off, on, exact = (verdict.run(way) for way in (OFF, ON, EXACT))
    assert off.total is not None
    assert on.total is not None, on.refusal
    first = on.first_departure
    return Fidelity(
        name, off.differing, off.total.beyond_one_step, on.differing, on.total.beyond_one_step, on.sqnr_db,
        exact.sqnr_db, on.top1, first.name if first is not None else "" if on.sites else "not seen", is_trained,
    )


def of_timm(name: str, config: str, folder: Path) -> Verdict:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    batches = torch.randn(4, 2, *model.default_cfg["input_size"])
    sim = qtk.QuantSim(model, batches[0], config=config)
    sim.compute_encodings(batches, progress=False)
    sim.export(folder, formats=["onnx"])
    return sim.verify_export(folder, batches[:2], turns=0, progress=False)


def of_digits(name: str, config: str, folder: Path) -> Verdict:
    digits = load_digits_split()
    sim = qtk.QuantSim(build_demo(name), digits.test_images[:2], config=config)
    sim.compute_encodings(digits.train_images[:512].split(128), progress=False)
    sim.export(folder, formats=["onnx"])
    return sim.verify_export(folder, digits.test_images.split(128), turns=0, progress=False)


def of_zoo(name: str, config: str, folder: Path) -> Verdict:
    entry, sim = ZOO[name], simulated(name, config=config)
    sim.export(folder, formats=["onnx"])
    sizes = (2, 3) if entry.dynamic else (2, 2)
    return sim.verify_export(
        folder, sizes, forward=lambda model, size: entry.run(model, size), turns=0, progress=False)


def measure(name: str, config: str) -> Fidelity:
    kind = of_digits if name in DEMO_MODELS else of_zoo if name in ZOO else of_timm
    with tempfile.TemporaryDirectory() as folder:
        return fidelity(name, kind(name, config, Path(folder) / "out"), is_trained=name in DEMO_MODELS)


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.3%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=(*DEMO_MODELS, *ZOO, *TIMM))
    parser.add_argument("--config", default="onnxruntime")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--quick", action="store_true", help="one small model, to see that the script runs")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found, failed = [], []
    for name in tqdm(["digits_cnn"] if arguments.quick else arguments.models, unit="model"):
        try:
            found.append(measure(name, arguments.config))
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    saturates = "saturates u8 × s8" if integer_sums_saturate() else "has exact sums of u8 × s8"
    table = Table(title=f"ONNX Runtime {onnxruntime.__version__} against the simulation; target {arguments.config}; "
                  f"this CPU {saturates}", title_justify="left")
    for heading in ("model", "off: differing", "> 1 step", "on: differing", "> 1 step", "SQNR, dB", "exact mode, dB",
                    "top-1", "first to differ"):
        table.add_column(heading, justify="left" if heading in ("model", "first to differ") else "right")
    for each in found:
        table.add_row(
            each.model, share(each.off_differing), share(each.off_beyond_one_step), share(each.on_differing),
            share(each.on_beyond_one_step), f"{each.on_sqnr_db:.1f}", f"{each.exact_mode_sqnr_db:.1f}",
            share(each.top1), each.first_to_differ,
        )
    console = Console(width=170)
    console.print(table)
    missed = [f"{each.model}: {target}" for each in found for target in each.missed()]
    console.print(f"{len(found)} models, {len(missed)} targets missed, {len(failed)} failed")
    for line in (*missed, *failed):
        console.print(line, highlight=False)
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(found[0])))
            writer.writeheader()
            writer.writerows(asdict(each) for each in found)


if __name__ == "__main__":
    main()
