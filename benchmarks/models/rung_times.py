"""Estimated and measured: how long ONNX Runtime takes with the settings that ``qtk.quantize`` orders by an estimate.

    python benchmarks/models/rung_times.py [--models digits_vit] [--target onnxruntime]

Settings are plain calibration, dynamic quantization and precise sites, W8A8, 32 images a call. Times are over plain
calibration's: CPU time of one thread, the least of the turns, which other work on the machine changes little. *Rank
correlation* is Spearman's of the two over the settings of a net.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path

import torch

import qtk
from qtk.auto.choices import Choices
from qtk.auto.trial_builder import TrialBuilder
from qtk.config.load import load_config
from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS, build
from qtk.errors import QtkError
from qtk.report.table import Column, Table
from qtk.runtimes.session import create_session


def cpu_ms(sim: qtk.QuantSim, images: torch.Tensor, turns: int = 60) -> float:
    """The least CPU time of a call of the exported file, in one thread."""
    with tempfile.TemporaryDirectory() as folder:
        sim.export(Path(folder) / "sim", formats=("onnx",), check=False)
        session, _ = create_session(Path(folder) / "sim" / "model.onnx", threads=1)
    feed = {session.get_inputs()[0].name: images.numpy()}
    times = []
    for _ in range(turns):
        begun = time.process_time()
        session.run(None, feed)
        times.append(time.process_time() - begun)
    return 1000 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DEMO_MODELS))
    parser.add_argument("--target", default="onnxruntime")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    batches = list(load_digits_split().train_images[:256].split(32))
    rows = []
    for name in arguments.models:
        model = qtk.prepare_model(build(name), batches[0])
        builder = TrialBuilder(model, batches[0], load_config(arguments.target), 8, 8, batches,
                               dynamic=load_config("dynamic"))
        plain = Choices("min_max")
        sites = builder.ranking(plain)
        counts = [count for count in (1, 2, 4, 8, 16, 32) if count < len(sites) // 2] + [len(sites) // 2]
        first = cpu_ms(builder.simulation(plain), batches[0])
        pairs = []
        for choices in (plain, Choices("min_max", dynamic=True),
                        *(Choices("min_max", precise=tuple(sites[:count])) for count in counts)):
            try:
                measured = cpu_ms(builder.simulation(choices), batches[0]) / first
            except QtkError as error:
                rows.append((name, str(choices), "–", f"{error}"[:40]))
                continue
            pairs.append((builder.price(choices) / builder.price(plain), measured))
            rows.append((name, str(choices), f"{pairs[-1][0]:.2f}", f"{measured:.2f}"))
            print(*rows[-1], flush=True)
        ranks = torch.tensor(pairs, dtype=torch.float64).argsort(0).argsort(0).double()
        rows.append((name, "rank correlation", f"{float(torch.corrcoef(ranks.T)[0, 1]):.2f}", ""))
    columns = (Column("model"), Column("settings"), Column("estimated", number=True), Column("measured", number=True))
    print(Table("run time over plain calibration's", columns, tuple(rows)).text())


if __name__ == "__main__":
    main()
