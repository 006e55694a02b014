"""What Core AI makes of the target coreai: against the simulation, on a Mac, or by coreai-core's CPU code elsewhere.

Per model: the share of equal top-1, of values that differ and that are over 1 step away, the largest, the SQNR to the
simulation, size against the float file, and seconds of the export. The models are of ``bench_litert``. Needs
coreai-torch.

    python benchmarks/models/bench_coreai.py
    python benchmarks/models/bench_coreai.py --models digits_cnn resnet18
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path

from bench_litert import Case, crnn, digits, gru_stream, images
from rich.console import Console
from rich.table import Table

import qtk
from qtk.calls.calls import Call
from qtk.demo.models import DEMO_MODELS
from qtk.errors import QtkError
from qtk.export.coreai import file as coreai
from qtk.graph.graphs import roots
from qtk.workflow.verify_export import size_bytes

MODELS = [*DEMO_MODELS, "crnn", "gru_stream", "resnet18", "mobilenetv3_small_050", "vit_tiny_patch16_224"]


def case(name: str) -> Case:
    if name in DEMO_MODELS:
        return digits(name)
    return {"crnn": crnn, "gru_stream": gru_stream}.get(name, lambda: images(name))()


def row(name: str) -> list[str]:
    """The cells of a model, or what refused it."""
    made = case(name)
    sim = qtk.QuantSim(made.model, made.calibration, config="coreai")
    sim.compute_encodings([made.calibration], progress=False)
    with tempfile.TemporaryDirectory() as folder:
        directory, start = Path(folder) / "out", time.perf_counter()
        try:
            sim.export(directory, formats=("coreai",), check=False, progress=False)
        except QtkError as error:
            return [name, str(error)[:60]]
        seconds = time.perf_counter() - start
        run = sim.verify_export(directory, [made.evaluation], runtime="coreai", progress=False).runs[0]
        in_float = Path(folder) / "float.aimodel"
        prepared = qtk.prepare_model(made.model, made.calibration)
        coreai.export(roots(prepared)[""], Call(made.calibration, {}, None), in_float)
        size, float_size = size_bytes(directory / "model.aimodel"), size_bytes(in_float)
    if run.total is None:
        return [name, str(run.refusal)[:60]]
    steps = run.total.max_steps
    return [name, "–" if run.top1 is None else f"{run.top1:.2%}", f"{run.total.differing:.2%}",
            "–" if run.total.beyond_one_step is None else f"{run.total.beyond_one_step:.2%}",
            "–" if steps is None else f"{steps:.3g}", f"{run.sqnr_db:.1f}", f"{size:,}", f"{size / float_size:.3f}",
            f"{seconds:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    warnings.simplefilter("ignore")
    table = Table(title="coreai in Core AI, against the simulation", title_justify="left")
    for heading in ("model", "top-1", "differing", "> 1 step", "largest", "SQNR, dB", "bytes", "of float", "export, s"):
        table.add_column(heading)
    for name in parser.parse_args().models:
        table.add_row(*row(name))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
