"""``qtk.assign_bits`` under milliseconds in ONNX Runtime, measured again afterwards from the exported file.

The budget lies between the latencies of the model in 8 bits and with all products in float, which are measured first;
weights are random. The file is measured in turns with the model in 8 bits: "again" is their ratio times what the search
measured for 8 bits, since a machine's speed drifts by more than 5 % within the minutes that a search takes.

    python benchmarks/models/assign_latency.py [--models vit_tiny_patch16_224 resnet18] [--shares 0.4 0.7] [--turns 60]
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path

import timm
import torch

import qtk
from qtk.analysis.float_outputs import sqnr_db
from qtk.auto.bit_assignment import BitAssignment
from qtk.report.table import Column, Table
from qtk.runtimes.latency import median_latencies_ms
from qtk.runtimes.session import create_session


def simulated(name: str, x: torch.Tensor) -> qtk.QuantSim:
    torch.manual_seed(0)
    return qtk.QuantSim(timm.create_model(name).eval(), x, config="onnxruntime")


def quantized(name: str, batches: list[torch.Tensor]) -> qtk.QuantSim:
    """The model in 8 bits."""
    sim = simulated(name, batches[0][:1])
    sim.compute_encodings(batches, progress=False)
    return sim


def costs_by_name(found: BitAssignment) -> dict[str, float]:
    """Milliseconds of the assignments that were measured."""
    return {each.what: each.cost for each in found.measured}


def searched(name: str, batches: list[torch.Tensor], budget: float) -> tuple[qtk.QuantSim, BitAssignment, float]:
    """A simulation under the budget, what was found, and the seconds it took."""
    sim = simulated(name, batches[0][:1])
    started = time.perf_counter()
    found = qtk.assign_bits(sim, batches, budget={"milliseconds": budget}, progress=False)
    return sim, found, time.perf_counter() - started


def again(sims: dict[str, qtk.QuantSim], x: torch.Tensor, turns: int) -> dict[str, float]:
    """Latencies of files that are exported and opened anew, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for name, sim in sims.items():
            sim.export(Path(folder) / name, formats=("onnx",))
            session, _ = create_session(Path(folder) / name / "model.onnx")
            feed = {session.get_inputs()[0].name: x.numpy()}
            runs[name] = lambda session=session, feed=feed: session.run(None, feed)
        return median_latencies_ms(runs, turns=turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit_tiny_patch16_224", "resnet18"])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.4, 0.7])
    parser.add_argument("--turns", type=int, default=60)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in arguments.models:
        batches = list(torch.randn(4, 2, 3, 224, 224, generator=torch.Generator().manual_seed(0)))
        _, loose, _ = searched(name, batches, 1e6)
        low, high = (costs_by_name(loose)[each] for each in ("all 8 bits", "all float"))
        (equal,) = (sqnr_db(each.loss) for each in loose.measured if each.what == "all 8 bits")
        for share in arguments.shares:
            budget = low + share * (high - low)
            sim, found, seconds = searched(name, batches, budget)
            measured = again({"assigned": sim, "8 bits": quantized(name, batches)}, batches[0][:1], arguments.turns)
            drift = costs_by_name(found)["all 8 bits"] / measured["8 bits"]
            floats = sum(row.width == "float" for row in found.rows)
            rows.append((name, f"{low:.2f}", f"{high:.2f}", f"{budget:.2f}", f"{found.cost:.2f}",
                         f"{measured['assigned'] * drift:.2f}", f"{drift:.2f}", f"{equal:.1f}",
                         f"{sqnr_db(found.measured[0].loss):.1f}", f"{floats} of {len(found.rows)}", f"{seconds:.0f}"))
    headings = ("model", "8 bits, ms", "float, ms", "budget, ms", "found, ms", "again, ms", "drift",
                "SQNR in 8 bits, dB", "SQNR, dB", "sites in float", "s")
    print(Table("milliseconds", tuple(Column(each, number=index > 0) for index, each in enumerate(headings)),
                tuple(rows)).text())


if __name__ == "__main__":
    main()
