"""What LiteRT makes of the target litert: against the simulation, and beside ai-edge-quantizer's static int8.

Per model: the share of equal top-1, of values over 0 and over 1 step, the largest, integer and float operators, size,
and milliseconds against the float file, one thread and one row, of the file as LiteRT runs it (XNNPACK); then the SQNR
to the float model of qtk's file and of ai-edge-quantizer's, both calibrated on the same inputs. The digits nets have
their weights and data, MiniLM its weights and the documentation's words; others have random weights and made inputs.
Needs litert-torch; MiniLM needs transformers and a folder with the files of all-MiniLM-L6-v2.

    python benchmarks/models/bench_litert.py
    python benchmarks/models/bench_litert.py --models digits_cnn minilm --minilm FOLDER
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import qtk
from qtk.calls.calls import Call
from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS
from qtk.demo.models import build as demo
from qtk.export.litert import file as litert
from qtk.graph.graphs import roots
from qtk.numerics.error import decibels
from qtk.runtimes.litert_file import LiteRtFile
from qtk.runtimes.loaded_file import rows_like

TARGET = "litert"
IMAGES = {"resnet18": 224, "mobilenetv3_small_050": 224, "vit_tiny_patch16_224": 224}
WIDTH, STEPS, LENGTH = 128, 16, 32


@dataclass
class Case:
    """A model with the inputs that calibrate it and others that it is compared on, a row each."""

    model: nn.Module
    calibration: tuple[Tensor, ...]
    evaluation: tuple[Tensor, ...]


class Crnn(nn.Module):
    """Three convolutions with pooling, a bidirectional LSTM over the width, scores of 40 characters."""

    def __init__(self) -> None:
        super().__init__()
        widths, layers = (1, 32, 64, 96), []
        for index in range(3):
            layers += [nn.Conv2d(widths[index], widths[index + 1], 3, padding=1), nn.BatchNorm2d(widths[index + 1]),
                       nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.lstm, self.scores = nn.LSTM(96, 64, bidirectional=True, batch_first=True), nn.Linear(128, 40)

    def forward(self, images: Tensor) -> Tensor:
        columns = self.features(images).mean(2).transpose(1, 2)
        steps, _ = self.lstm(columns)
        return self.scores(steps)


class GruStream(nn.Module):
    """A step of a GRU: frame and state in, output and state out."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.cell, self.decode = nn.Linear(40, 64), nn.GRUCell(64, 96), nn.Linear(96, 40)

    def forward(self, frame: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(torch.relu(self.encode(frame)), state)
        return torch.sigmoid(self.decode(state)), state


class MiniLM(nn.Module):
    """The sentence embedding: mean of the last states over the tokens that count."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import AutoModel  # an extra

        self.bert = AutoModel.from_pretrained(folder, attn_implementation="sdpa")

    def forward(self, ids: Tensor) -> Tensor:
        return self.bert(input_ids=ids).last_hidden_state.mean(1)


def digits(name: str) -> Case:
    split = load_digits_split()
    return Case(demo(name), (split.train_images[:256],), (split.test_images,))


def images(name: str) -> Case:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.1)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    smooth = nn.functional.interpolate(torch.randn(24, 3, 28, 28), size=IMAGES[name], mode="bilinear")
    return Case(model.eval(), (smooth[:8],), (smooth[8:],))


def crnn() -> Case:
    torch.manual_seed(0)
    x = torch.rand(64, 1, 32, WIDTH)
    return Case(Crnn().eval(), (x[:32],), (x[32:],))


def gru_stream() -> Case:
    """States as the float model reaches them after some steps."""
    torch.manual_seed(0)
    model, frames = GruStream().eval(), torch.randn(8, 192, 40)
    state = torch.zeros(192, 96)
    with torch.no_grad():
        for frame in frames:
            _, state = model(frame, state)
    return Case(model, (frames[0, :64], state[:64]), (frames[1, 64:], state[64:]))


def minilm(folder: Path) -> Case:
    from transformers import AutoTokenizer  # an extra

    text = " ".join(path.read_text(encoding="utf-8") for path in sorted(Path("docs").glob("*.md")))
    words = re.findall(r"[A-Za-z]{2,}", text)
    sentences = [" ".join(words[start:start + LENGTH]) for start in range(0, 64 * LENGTH, LENGTH)]
    ids = AutoTokenizer.from_pretrained(folder)(sentences, max_length=LENGTH, truncation=True, return_tensors="pt")
    rows = ids["input_ids"]
    return Case(MiniLM(folder).eval(), (rows[:32],), (rows[32:],))


def returned(file: Path, inputs: Sequence[Tensor], expected: Tensor) -> Tensor:
    """The first output of a file."""
    loaded = LiteRtFile(file, {}, threads=1)
    rows = loaded.run(dict(zip(loaded.inputs, inputs, strict=True)))[loaded.outputs[0]]
    value = rows_like(rows, expected)
    assert value is not None
    return value


def by_ai_edge_quantizer(float_file: Path, case: Case, folder: Path) -> Path:
    """The float file in static int8."""
    from ai_edge_quantizer import quantizer, recipe

    names = LiteRtFile(float_file, {}, threads=1).inputs
    dtypes = [torch.int32 if each.dtype is torch.int64 else each.dtype for each in case.calibration]
    data = [{name: value[row:row + 1].to(dtype).numpy() for name, value, dtype in zip(
        names, case.calibration, dtypes, strict=True)} for row in range(len(case.calibration[0]))]
    made = quantizer.Quantizer(str(float_file))
    made.load_quantization_recipe(recipe.static_wi8_ai8())
    result = made.quantize(made.calibrate({"serving_default": data}, num_threads=1), enable_progress_report=False)
    path = folder / "other.tflite"
    path.write_bytes(bytes(result.quantized_model))
    return path


def sqnr_db(expected: Tensor, found: Tensor) -> float:
    return decibels(float(expected.double().square().sum()), float((expected.double() - found.double()).square().sum()))


def row(name: str, case: Case, config: str, turns: int) -> tuple[str, ...]:
    """Exports, verifies and compares; a row of the table."""
    started = time.perf_counter()
    sim = qtk.QuantSim(case.model, case.calibration, config=config)
    sim.compute_encodings([case.calibration], progress=False)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "out"
        sim.export(directory, formats=("litert",))
        seconds = time.perf_counter() - started
        verdict = sim.verify_export(directory, [case.evaluation], runtime="litert", turns=turns, threads=1,
                                    progress=False)
        run = verdict.runs[0]
        with torch.no_grad():
            in_float = case.model(*case.evaluation)
        expected = in_float[0] if isinstance(in_float, tuple) else in_float
        ours = sqnr_db(expected, returned(directory / "model.tflite", case.evaluation, expected))
        in_float_file = Path(folder) / "float.tflite"
        prepared = qtk.prepare_model(case.model, case.calibration)
        litert.export(roots(prepared)[""], Call(case.calibration, {}, None), in_float_file)
        try:
            other = by_ai_edge_quantizer(in_float_file, case, Path(folder))
            theirs = f"{sqnr_db(expected, returned(other, case.evaluation, expected)):.1f}"
        except Exception as error:  # whatever it says
            theirs = f"{type(error).__name__}: {error}"[:60]
    if run.total is None or run.nodes is None:
        return name, f"{run.refusal}", *["–"] * 11
    return (
        name, verdict.level.value, "–" if run.top1 is None else f"{run.top1:.2%}", _share(run.total.other_codes),
        _share(run.total.beyond_one_step), f"{run.total.max_steps:.0f}" if run.total.max_steps is not None else "–",
        f"{run.sqnr_db:.1f}", str(sum(run.nodes.integer.values())), str(len(run.nodes.floats)),
        f"{verdict.size_bytes:,}", f"{run.latency_ms or 0:.3g}",
        f"{(run.latency_ms or 0) / (run.float_latency_ms or 1):.2f}", f"{ours:.1f}", theirs, f"{seconds:.0f}",
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*DEMO_MODELS, *IMAGES, "crnn", "gru_stream", "minilm"]
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--minilm", type=Path, help="a folder with the files of all-MiniLM-L6-v2")
    parser.add_argument("--config", default=TARGET, help="a target, or a file that extends it")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="one model, to see that the script runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.turns = ["gru_stream"], 3
    warnings.simplefilter("ignore")
    table = Table(title=f"{arguments.config} in LiteRT, one thread, one row", title_justify="left")
    headings = ("model", "verdict", "top-1 equal", "> 0 steps", "> 1 step", "largest", "SQNR, dB", "integer", "float",
                "bytes", "ms", "× float", "to float, dB", "ai-edge-quantizer", "s to export")
    for heading in headings:
        table.add_column(heading)
    console = Console(width=200)
    others: dict[str, Callable[[], Case]] = {"crnn": crnn, "gru_stream": gru_stream}
    for name in arguments.models:
        if name == "minilm" and arguments.minilm is None:
            console.print("minilm is left out: no --minilm FOLDER")
            continue
        case = (digits(name) if name in DEMO_MODELS else images(name) if name in IMAGES
                else minilm(arguments.minilm) if name == "minilm" else others[name]())
        cells = row(name, case, arguments.config, arguments.turns)
        console.print(" | ".join(cells), highlight=False)
        table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
