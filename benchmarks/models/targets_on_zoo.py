"""Every shipped target with a runtime × the zoo: planned, exported, rules kept, run, equal to the simulation.

ONNX files run in ONNX Runtime, those of the target openvino in OpenVINO where it is installed; exported programs in
torch, those of the target xnnpack in ExecuTorch and those of x86_inductor in Inductor with torchao's patterns where
these are installed, with the number of layers that run in integers and in float. A model "agrees" if its outputs have
35 dB or more against the simulation. Weights are random and nets tiny: one value on a rounding edge is a large part of
an output.

    python benchmarks/models/targets_on_zoo.py --csv targets.csv
    python benchmarks/models/targets_on_zoo.py --targets tensorrt xnnpack --models residual vit
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import logging
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench_lowering import X86, XNNPACK, Lowered, compiled, delegated, register
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))

import qtk
from qtk.calls.inputs import input_leaves
from qtk.calls.signature import input_names
from qtk.cli.onnx_file import OnnxFile
from qtk.errors import ConfigError
from qtk.runtimes.openvino_model import OpenVinoModel, has_openvino
from qtk.torch_private import pytree
from qtk.workflow.check_target import check_target, runtimes
from tests.zoo.entry import Entry
from tests.zoo.models import ZOO
from tests.zoo.prepared import simulated

AGREES_DB = 35.0
NOTHING = "nothing of this model would be quantized"


@dataclass
class Outcome:
    """What became of one model by one target; ``reached`` is the last stage that worked."""

    target: str
    model: str
    reached: str = "none"
    violations: int = 0
    runtime: str = ""
    integer_layers: int | None = None
    float_layers: int | None = None
    sqnr_db: float = math.nan
    detail: str = ""


def outcome(target: str, name: str) -> Outcome:
    result, entry = Outcome(target, name), ZOO[name]
    try:
        sim = simulated(name, config=target)
        result.reached = "planned"
        with tempfile.TemporaryDirectory() as folder:
            exported = Path(folder) / "exported"
            sim.export(exported, formats=runtimes()[target].formats[0])
            result.reached = "exported"
            checks = check_target(exported)
            result.violations = sum(len(check.violations) for check in checks)
            result.detail = next((str(each) for check in checks for each in check.violations), "")
            if not result.violations:
                result.reached = "kept"
            if len(checks) == 1 and checks[0].path.stem == "model":
                result.runtime, outputs, lowered = run(checks[0].path, target, sim, entry)
                if lowered is not None:
                    result.integer_layers, result.float_layers = lowered.integer_layers, len(lowered.float_layers)
                with torch.no_grad():
                    expected = pytree.tree_leaves(entry.run(sim.model))
                result.sqnr_db = sqnr_db(outputs, expected)
                result.reached = "ran"
    except ConfigError as error:
        result.detail = str(error)
        result.reached = "nothing" if NOTHING in str(error) else result.reached
    except Exception as error:
        result.detail = f"{type(error).__name__}: {error}".partition("\n")[0]
    return result


def run(path: Path, target: str, sim: qtk.QuantSim, entry: Entry) -> tuple[str, list[object], Lowered | None]:
    """The runtime that ran a file, its outputs, and what it ran if a compiler says it."""
    inputs = entry.inputs()
    args, kwargs = ((inputs,), {}) if isinstance(inputs, Tensor) else ((), dict(inputs)) if isinstance(
        inputs, dict) else (tuple(inputs), {})
    if path.suffix == ".onnx":
        if target == "openvino" and has_openvino():
            model = OpenVinoModel(path)
            leaves = zip(input_names(sim.model), input_leaves(sim.model.graph, args, kwargs), strict=True)
            return model.runtime, model.run({key: leaf for key, leaf in leaves if isinstance(leaf, Tensor)}), None
        file = OnnxFile(path, sim.model)
        return "ONNX Runtime", list(file(*args, **kwargs)), None
    program = torch.export.load(path)
    leaves = [each for each in pytree.tree_leaves((args, kwargs)) if each is not None]
    if target == "xnnpack" and importlib.util.find_spec("executorch") is not None:
        register(XNNPACK)
        lowered = delegated(program)
        return "ExecuTorch", pytree.tree_leaves(lowered.run(*leaves)), lowered
    if target == "x86_inductor" and importlib.util.find_spec("torchao") is not None:
        register(X86)
        torch.compiler.reset()
        lowered = compiled(program.module(), *args, **kwargs)
        return "Inductor with torchao", pytree.tree_leaves(lowered.run(*args, **kwargs)), lowered
    return "torch", pytree.tree_leaves(program.module()(*args, **kwargs)), None


def sqnr_db(outputs: Iterable[object], expected: Iterable[object]) -> float:
    """Of all float outputs together; infinite if they are equal."""
    signal = noise = 0.0
    tensors = ([each for each in values if isinstance(each, Tensor)] for values in (outputs, expected))
    for found, wanted in zip(*tensors, strict=True):
        if wanted.is_floating_point():
            signal += float(wanted.double().square().sum())
            noise += float((found.double() - wanted.double()).square().sum())
    return math.inf if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise)


def summary(outcomes: list[Outcome]) -> str:
    """The table in Markdown, one line a target."""
    lines = ["| target | models | nothing to quantize | planned | exported | rules kept | ran in | ran | equal | agree "
             "| worst SQNR, dB | layers in integers, float |", "|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for target in dict.fromkeys(each.target for each in outcomes):
        own = [each for each in outcomes if each.target == target]
        ran = [each for each in own if each.reached == "ran"]
        reached = Counter(each.reached for each in own)
        exported = reached["exported"] + reached["kept"] + reached["ran"]
        kept = sum(each.reached in ("kept", "ran") and not each.violations for each in own)
        worst = min(ran, key=lambda each: each.sqnr_db, default=None)
        names = ", ".join(sorted({each.runtime for each in ran}))
        equal, agree = (sum(each.sqnr_db >= bound for each in ran) for bound in (math.inf, AGREES_DB))
        text = "" if worst is None else "equal" if math.isinf(worst.sqnr_db) else f"{worst.sqnr_db:.1f} ({worst.model})"
        counted = [each for each in ran if each.integer_layers is not None]
        layers = [sum(getattr(each, key) for each in counted) for key in ("integer_layers", "float_layers")]
        lines.append(f"| {target} | {len(own)} | {reached['nothing']} | {reached['planned'] + exported} | {exported} | "
                     f"{kept} | {names} | {len(ran)} | {equal} | {agree} | {text} | "
                     f"{', '.join(map(str, layers)) if counted else ''} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--targets", nargs="+", choices=list(runtimes()), default=list(runtimes()))
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    pairs = [(target, name) for name in options.models for target in options.targets]
    outcomes = [outcome(target, name) for target, name in tqdm(pairs, unit="file")]
    outcomes.sort(key=lambda each: options.targets.index(each.target))
    if options.csv is not None:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(asdict(outcomes[0])))
            writer.writeheader()
            writer.writerows(asdict(each) for each in outcomes)
    print(summary(outcomes))
    for each in outcomes:
        if each.detail:
            print(f"{each.target}, {each.model}: {each.detail}"[:400])


if __name__ == "__main__":
    main()
