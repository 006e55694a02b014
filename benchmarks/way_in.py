"""Counts the files, lines, functions and classes of qtk that a small CNN enters on its way to an ONNX file.

Also the time of ``import qtk`` and of a process's first ``QuantSim``. ``python benchmarks/way_in.py``
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
import statistics
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import qtk

PACKAGE = str(Path(qtk.__file__).parent)
IMPORT = """
import sys, time, torch
start = time.process_time()
import qtk
qtk.QuantSim
print(time.process_time() - start, sum(name.partition(".")[0] == "qtk" for name in sys.modules))
"""
FIRST = """
import time, torch
import qtk
from qtk.demo.{module} import {model}
x = torch.randn(2, 1, 8, 8)
prepared = qtk.prepare_model({model}().eval(), x)
start = time.process_time()
qtk.QuantSim(prepared, x)
print(time.process_time() - start)
"""
TURNS = 5


@dataclass
class Entered:
    """Files, functions and classes that ran, and how often a Python function of qtk was called."""

    files: set[str] = field(default_factory=set)
    functions: set[types.CodeType] = field(default_factory=set)
    classes: set[type] = field(default_factory=set)
    calls: int = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _on_event(self, frame: types.FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name == "<module>":
            return
        self.files.add(code.co_filename)
        self.functions.add(code)
        self.calls += 1
        owner = frame.f_locals.get("self")
        if type(owner).__module__.startswith("qtk."):
            self.classes.add(type(owner))

    def __or__(self, other: Entered) -> Entered:
        return Entered(self.files | other.files, self.functions | other.functions, self.classes | other.classes,
                       self.calls + other.calls)

    def row(self) -> tuple[int, int, int, int, int]:
        lines = sum(Path(file).read_text(encoding="utf-8").count("\n") for file in self.files)
        return len(self.files), lines, len(self.functions), len(self.classes), self.calls


def stages() -> dict[str, Entered]:
    """What each step enters, after all modules are imported: importing one runs its classes and registrations."""
    for module in pkgutil.walk_packages(qtk.__path__, "qtk."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).eval()
    x, entered = torch.randn(4, 3, 8, 8), {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        def step(name, run):
            entered[name] = Entered()
            with entered[name].watching():
                return run()

        prepared = step("prepare_model", lambda: qtk.prepare_model(model, x))
        sim = step("QuantSim", lambda: qtk.QuantSim(prepared, x, weight_bits=4))
        step("compute_encodings", lambda: sim.compute_encodings([x], progress=False))
        step("sim.model(x)", lambda: sim.model(x))
        step("export to ONNX", lambda: sim.export(f"{folder}/exported", formats="onnx"))
    total = Entered()
    for each in entered.values():
        total |= each
    return {**entered, "all": total}


def in_fresh_processes(program: str) -> list[float]:
    """The numbers that a program prints, each the median of several runs."""
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
            for _ in range(TURNS)]
    return [statistics.median(map(float, numbers)) for numbers in zip(*runs, strict=True)]


def main() -> None:
    print(f"4-op CNN, W4A8    {'files':>8}{'lines':>8}{'functions':>11}{'classes':>9}{'calls':>9}")
    for name, entered in stages().items():
        files, lines, functions, classes, calls = entered.row()
        print(f"{name:18}{files:8}{lines:8}{functions:11}{classes:9}{calls:9}")
    seconds, modules = in_fresh_processes(IMPORT)
    print(f"\nCPU seconds in fresh processes, medians of {TURNS}")
    print(f"import qtk, beside torch {seconds:.2f} (goal 0.40), {modules:.0f} modules (goal 220)")
    for shown, module, model in (("CNN", "small_cnn", "SmallCnn"), ("ViT", "small_vit", "SmallViT")):
        (seconds,) = in_fresh_processes(FIRST.format(module=module, model=model))
        print(f"first QuantSim of the prepared demo {shown} {seconds:.2f} (goal 0.10)")


if __name__ == "__main__":
    main()
