"""What is wrong with an exported file, judged by its runs, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qtk.report.difference import Difference
from qtk.report.verdict import EXACT, OFF, ON, OPENVINO, Finding, Level, Run

WITHIN_ONE_STEP = 0.999
"""The share of output values that must be within one step of the simulation's, unless SQNR is high."""

HIGH_SQNR_DB = 35.0
"""SQNR against the simulation above which a deep model computes what was simulated: what is left are values on
rounding edges, which differ by a step after float sums in another order, and what follows from them."""

MOST_STRAY, STRAY_STEPS = 2, 4.0
"""Values on the edge of two codes, and how far they may take a value: where so few would be too large a share."""

WORSE_DB = 1.0
"""A run that loses more than this against another one is worse."""

SATURATION_REMEDY = (
    "use config='onnxruntime' (or weight: {reduced_range: true}), weight: {dtype: uint8, symmetric: true}, or open "
    "sessions with session.x64quantprecision=1, which reaches neither loops over time nor stacks of matrices"
)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a file is, and where it ran.

    Args:
        runtime: the runtime that it is for, ``onnxruntime`` or ``openvino``; a failure in another one is yellow.
        saturates: whether ONNX Runtime's uint8 × int8 sums saturate on this CPU.
        saturating_weights: sites of weights whose products can saturate on such a CPU.
        has_minifloats: whether the file holds float8 values.
        is_half: whether the model computes in float16.
        random_inputs: whether the inputs were random values, on which a model is more sensitive than on data.
        tolerance_db: the SQNR that a right file may have on the data (``qtk.workflow.tolerance``).
    """

    runtime: str = "onnxruntime"
    saturates: bool = False
    saturating_weights: Sequence[str] = ()
    has_minifloats: bool = False
    is_half: bool = False
    random_inputs: bool = False
    tolerance_db: float = HIGH_SQNR_DB


def agrees(run: Run, tolerance_db: float = HIGH_SQNR_DB) -> bool:
    """Whether a run computes what was simulated, all outputs together, as ``is_close`` says.

    >>> agrees(Run(OFF, "a runtime that refuses the file"))
    False
    """
    return run.total is not None and is_close(run.total, tolerance_db)


def is_close(difference: Difference, tolerance_db: float = HIGH_SQNR_DB) -> bool:
    """Whether values are within one step nearly everywhere, or have a high SQNR.

    Args:
        difference: of the values from the simulation's.
        tolerance_db: the SQNR that a right file may have (``qtk.workflow.tolerance``), where that is lower.

    >>> close = Difference("y", elements=20, differing=0.05, beyond_one_step=0.05, max_difference=1, max_steps=2,
    ...                    sqnr_db=30.0)
    >>> is_close(close), is_close(close, tolerance_db=26.0)
    (False, True)
    """
    beyond = difference.beyond_one_step
    is_high = difference.sqnr_db >= min(HIGH_SQNR_DB, tolerance_db)
    return is_high or (beyond is not None and beyond <= 1 - WITHIN_ONE_STEP)


def judge(runs: Sequence[Run], circumstances: Circumstances) -> tuple[Finding, ...]:
    """Everything that is wrong or worth knowing, the most serious first."""
    by_way = {run.way: run for run in runs}
    findings = [*_unoptimized(by_way[OFF], circumstances), *_optimized(by_way, circumstances)]
    if OPENVINO in by_way:
        findings += _openvino(by_way[OPENVINO], circumstances)
    if circumstances.is_half:
        findings.append(Finding(
            Level.YELLOW, "ONNX Runtime has no integer kernels between float16 values on the CPU",
            "simulate and export model.float()",
        ))
    findings += [finding for run in runs for finding in _slower(run)]
    return tuple(sorted(findings, key=lambda finding: finding.level is not Level.RED))


def _unoptimized(off: Run, circumstances: Circumstances) -> list[Finding]:
    if agrees(off):
        return []
    if agrees(off, circumstances.tolerance_db):
        assert off.total is not None
        return [Finding(
            Level.YELLOW, f"float rounding in another order takes the simulation as far from itself as the file is "
            f"({off.total.sqnr_db:.1f} dB): values on the edge of two codes change, and the model amplifies that",
            "judge the file by its accuracy; 16 bits for the sites that sim.compare lists first amplify less",
        )]
    if off.total is not None and _are_too_few(off.total):
        return [_too_few(off.total)]
    return [Finding(
        Level.RED, f"the file does not compute what was simulated, even with the optimizations off{_first(off)}",
        "verify it with the simulation it was exported from, or export it again",
    )]


def _optimized(runs: dict[str, Run], circumstances: Circumstances) -> list[Finding]:
    off, on, exact = runs[OFF], runs[ON], runs[EXACT]
    level = Level.RED if circumstances.runtime == "onnxruntime" else Level.YELLOW
    without_optimizations = "set session_options.graph_optimization_level to ORT_DISABLE_ALL"
    if on.total is None:
        return [Finding(level, f"ONNX Runtime refuses the file with its optimizations: {on.refusal}",
                        without_optimizations)]
    departs = not agrees(on, circumstances.tolerance_db) and _is_worse(on, off)
    if departs and _are_too_few(on.total):
        return [_too_few(on.total)]
    if circumstances.saturates and (_is_worse(on, exact) or (departs and circumstances.saturating_weights)):
        return [Finding(level, f"u8 × s8 saturates on this CPU, which has no VNNI{_first(on)}", SATURATION_REMEDY)]
    if departs:
        cause = "ONNX Runtime's optimizations change the results"
        if circumstances.has_minifloats:
            cause = "ONNX Runtime's optimizations take float8 for integers"
        elif circumstances.random_inputs:
            return [Finding(Level.YELLOW, f"on random inputs, {cause}{_first(on)}", "verify the file on data")]
        return [Finding(level, f"{cause}{_first(on)}", without_optimizations)]
    if circumstances.saturating_weights and circumstances.runtime == "onnxruntime":
        first, *others = circumstances.saturating_weights
        more = f" and {len(others)} other weights" if others else ""
        return [Finding(
            Level.YELLOW, f"u8 × s8 products of {first}{more} can saturate on x86 without VNNI", SATURATION_REMEDY
        )]
    return []


def _openvino(run: Run, circumstances: Circumstances) -> list[Finding]:
    level = Level.RED if circumstances.runtime == "openvino" else Level.YELLOW
    if run.total is None:
        return [Finding(level, f"OpenVINO refuses the file: {run.refusal}", "use config='openvino'")]
    if agrees(run):
        return []
    if circumstances.random_inputs:
        level = Level.YELLOW
    return [Finding(level, "OpenVINO's low-precision transformations change the results",
                    "use config='openvino', whose activations are symmetric int8")]


def _are_too_few(total: Difference) -> bool:
    """Whether one or two values alone, a few steps off, decide that the others are not close enough."""
    beyond, steps = total.beyond_one_step, total.max_steps
    return beyond is not None and steps is not None and beyond * total.elements <= MOST_STRAY and steps <= STRAY_STEPS


def _too_few(total: Difference) -> Finding:
    return Finding(Level.YELLOW, f"{total.elements} output values are too few to judge the file by",
                   "verify it on more data")


def _slower(run: Run) -> list[Finding]:
    latency, reference = run.latency_ms, run.float_latency_ms
    if run.way == EXACT or latency is None or reference is None or latency < reference:
        return []
    floats = [] if run.nodes is None else list(dict.fromkeys(node.op for node in run.nodes.weighted_floats))
    remedy = f"of its products, {', '.join(floats[:3])} {'is' if len(floats) == 1 else 'are'} in float" if floats else (
        "all its products are in integers; the model may be too small to gain")
    return [Finding(Level.YELLOW, f"{run.runtime}: {latency:.3g} ms, {latency / reference:.2f} × float", remedy)]


def _is_worse(run: Run, than: Run) -> bool:
    """Whether a run has more values beyond one step than another, or lost its high SQNR, and is farther off by 1 dB."""
    if run.total is None or than.total is None:
        return False
    beyond = run.total.beyond_one_step
    close = beyond is not None and beyond <= 1 - WITHIN_ONE_STEP
    return not close and than.sqnr_db - run.sqnr_db > WORSE_DB


def _first(run: Run) -> str:
    departure = next((site for site in run.sites if site.max_steps is not None and site.max_steps > 1.5), None)
    return "" if departure is None else f"; the first tensor off by more than one step is {departure.name}"
