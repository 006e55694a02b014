"""What is wrong with an exported file, judged by its runs, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qtk.report.difference import HIGH_SQNR_DB, WITHIN_ONE_STEP, Difference, are_too_few, far_outputs, is_close
from qtk.report.verdict import EXACT, OFF, ON, OPENVINO, FileRun, Finding, Level

EXACT_SQNR_DB, MOST_ON_EDGES = 60.0, 0.1
"""SQNR of an op that is given the simulation's values, or else the share of its codes that may be others, by a step.

Float sums in another order change 0.02 % of the codes in a BERT of six layers by three targets (67 dB, optimizations
off and on), and 9 % behind sin(100,000 x), which amplifies inside one op; a scale twice too large changes half of
them, a zero point that is off by one all."""

NO_FLOAT16 = "ONNX Runtime has no integer kernels between float16 values on the CPU"

MOST_CHANGED = 0.005
"""Share of an op's codes that optimizations may change: float sums in another order change 0.02 %, a bias rounded to
int32 in the scale of 4-bit products 1.7 % (README's ViT in W4A4)."""

AMPLIFIED_DB = 6.0
"""Two runs of a model that amplifies rounding, each op of which is right, may be so far from one another: twice."""

WORSE_DB = 1.0
"""A run that loses more than this against another one is worse."""

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
        tolerances_db: the SQNR that each output of a right file may have on the data (``qtk.runtimes.tolerance``);
            none: a high one.
        reference: what computed the values that the runs are compared with.
    """

    runtime: str = "onnxruntime"
    saturates: bool = False
    saturating_weights: Sequence[str] = ()
    has_minifloats: bool = False
    is_half: bool = False
    random_inputs: bool = False
    tolerances_db: Sequence[float] = ()
    reference: str = "the simulation"


def saturation_remedy(*, opens: bool) -> str:
    """Says what to do about u8 × s8 sums that saturate; ``opens``: ONNX Runtime opens the file in its exact mode.

    >>> saturation_remedy(opens=False)
    "use config='onnxruntime' (or weight: {reduced_range: true}), or weight: {dtype: uint8, symmetric: true}"
    """
    first, second = ("use config='onnxruntime' (or weight: {reduced_range: true})",
                     "weight: {dtype: uint8, symmetric: true}")
    if not opens:
        return f"{first}, or {second}"
    return (f"{first}, {second}, or open sessions with session.x64quantprecision=1, which reaches neither loops over "
            "time nor stacks of matrices")


def agrees(run: FileRun, tolerances_db: Sequence[float] = ()) -> bool:
    """Says whether a run computes each output as it was simulated, see ``far_outputs``.

    One or two values of a small output may be on the edge of two codes, where all outputs together are close.

    >>> agrees(FileRun(OFF, "a runtime that refuses the file"))
    False
    """
    if run.total is None:
        return False
    far = far_outputs(run.outputs or [run.total], tolerances_db)
    return not far or (is_close(run.total) and all(are_too_few(each, each.beyond_one_step) for each in far))


def judge(runs: Sequence[FileRun], circumstances: Circumstances) -> tuple[Finding, ...]:
    """Everything that is wrong or worth knowing, the most serious first."""
    by_way = {run.way: run for run in runs}
    findings = [*_unoptimized(by_way[OFF], circumstances), *_optimized(by_way, circumstances)]
    if OPENVINO in by_way:
        findings += _openvino(by_way[OPENVINO], circumstances)
    if circumstances.is_half:
        findings.append(Finding(
            Level.YELLOW, NO_FLOAT16, "simulate and export model.float()"))
    findings += [finding for run in runs for finding in _slower(run)]
    return tuple(sorted(findings, key=lambda finding: finding.level is not Level.RED))


def judge_alone(runs: Sequence[FileRun], circumstances: Circumstances) -> tuple[Finding, ...]:
    """Returns what is wrong with the runs of a runtime that has no other way to run its files exactly, red first.

    The first way is how the runtime comes; what another way gets wrong is yellow.

    >>> judge_alone([FileRun("LiteRT", "LiteRT 2.3", refusal="no kernel")], Circumstances())[0].cause
    'LiteRT 2.3 refuses the file: no kernel'
    """
    findings: list[Finding] = []
    for position, run in enumerate(runs):
        level = Level.RED if position == 0 else Level.YELLOW
        if run.total is None:
            findings.append(Finding(level, f"{run.runtime} refuses the file: {run.refusal}",
                                    "leave what it names in float, or verify the file in another runtime"))
        elif agrees(run, circumstances.tolerances_db):
            if not agrees(run):
                findings.append(_amplified(run, circumstances, explained=True, is_right=False))
        elif few := _too_few(run):
            findings.append(few)
        else:
            level = Level.YELLOW if circumstances.random_inputs else level
            where = next(filter(None, map(_first, (run, *runs))), "")  # some ways return no tensors but the outputs
            findings.append(Finding(
                level, f"{run.runtime} computes something else than {circumstances.reference}: "
                f"{_how_far(run, 'it')}{where}",
                "verify the file on data" if circumstances.random_inputs else
                "use the target of the runtime, or judge the file by its accuracy"))
    findings += [finding for run in runs for finding in _slower(run)]
    return tuple(sorted(findings, key=lambda finding: finding.level is not Level.RED))


def departs(op: Difference) -> bool:
    """Says whether an op that was given the reference values of its inputs, optimizations off, computes another result.

    >>> edges = Difference("y", elements=9999, differing=0.001, beyond_one_step=0.0, max_difference=1, max_steps=1,
    ...                    sqnr_db=30.0, other_codes=0.001)
    >>> shifted = Difference("y", elements=9999, differing=1.0, beyond_one_step=0.0, max_difference=1, max_steps=1,
    ...                      sqnr_db=30.0, other_codes=1.0)
    >>> departs(edges), departs(shifted)
    (False, True)
    """
    if op.other_codes is None or op.sqnr_db >= EXACT_SQNR_DB:
        return op.sqnr_db < HIGH_SQNR_DB
    limits = ((op.beyond_one_step, 1 - WITHIN_ONE_STEP), (op.other_codes, MOST_ON_EDGES))
    return any(share is not None and share > most and not are_too_few(op, share) for share, most in limits)


def is_changed(op: Difference) -> bool:
    """Says whether optimizations change what an op computes that was given the reference values of its inputs.

    >>> moved = Difference("y", elements=9999, differing=0.017, beyond_one_step=0.0, max_difference=1, max_steps=1,
    ...                    sqnr_db=30.0, other_codes=0.017)
    >>> is_changed(moved), departs(moved)
    (True, False)
    """
    if op.other_codes is None or op.sqnr_db >= EXACT_SQNR_DB:
        return not is_close(op)
    return op.other_codes > MOST_CHANGED and not are_too_few(op, op.other_codes)


def _unoptimized(off: FileRun, circumstances: Circumstances) -> list[Finding]:
    if agrees(off):
        return []
    explained = agrees(off, circumstances.tolerances_db)
    wrong = [op for op in off.ops or () if departs(op)]
    is_right = bool(off.ops) and not wrong
    if wrong and not (explained and off.unseen_sites):  # loops amplify inside
        return [_not_simulated(_departure(wrong, circumstances))]
    if explained or is_right:
        return [_amplified(off, circumstances, explained=explained, is_right=is_right)]
    if few := _too_few(off):
        return [few]
    return [_not_simulated(_first(off))]


def _not_simulated(where: str) -> Finding:
    return Finding(
        Level.RED, f"the file does not compute what was simulated, even with the optimizations off{where}",
        "verify it with the simulation it was exported from, or export it again",
    )


def _amplified(run: FileRun, circumstances: Circumstances, *, explained: bool, is_right: bool) -> Finding:
    reasons = []
    if is_right:
        reasons.append(f"given the values of {circumstances.reference}, each of its {len(run.ops or ())} ops computes "
                       f"the values of {circumstances.reference}")
    if explained:
        reasons.append(f"float rounding in another order takes {circumstances.reference} as far from itself")
    return Finding(
        Level.YELLOW, f"{run.way}: {_how_far(run, circumstances.reference)} because the model amplifies values on the "
        f"edge of two codes, not because of the file: {', and '.join(reasons)}",
        "judge the file by its accuracy; 16 bits for the sites that sim.compare lists first amplify less",
    )


def _optimized(runs: dict[str, FileRun], circumstances: Circumstances) -> list[Finding]:
    off, on, exact = runs[OFF], runs[ON], runs[EXACT]
    remedy = saturation_remedy(opens=exact.refusal is None)
    level = Level.RED if circumstances.runtime == "onnxruntime" else Level.YELLOW
    without_optimizations = "set session_options.graph_optimization_level to ORT_DISABLE_ALL"
    if on.total is None:
        return [Finding(level, f"ONNX Runtime refuses the file with its optimizations: {on.refusal}",
                        without_optimizations)]
    wrong = [op for op in on.ops or () if is_changed(op)]
    is_right = bool(on.ops) and not wrong
    where = _departure(wrong, circumstances) if wrong else _first(on)
    is_off = not agrees(on, circumstances.tolerances_db) and _is_worse(on, off)
    if is_off and is_right and not agrees(off) and not _is_worse(on, off, AMPLIFIED_DB):
        return []  # amplified as without the optimizations, where it is said
    if is_off and not wrong and (few := _too_few(on)):
        return [few]
    if circumstances.saturates and (_is_worse(on, exact) or (is_off and circumstances.saturating_weights)):
        return [Finding(level, f"u8 × s8 saturates on this CPU, which has no VNNI{where}", remedy)]
    if is_off:
        cause = "ONNX Runtime's optimizations change the results"
        if circumstances.has_minifloats:
            cause = "ONNX Runtime's optimizations take float8 for integers"
        elif circumstances.random_inputs:
            return [Finding(Level.YELLOW, f"on random inputs, {cause}{where}", "verify the file on data")]
        return [Finding(level, f"{cause}{where}", without_optimizations)]
    if circumstances.saturating_weights and circumstances.runtime == "onnxruntime":
        first, *others = circumstances.saturating_weights
        more = f" and {len(others)} other weights" if others else ""
        return [Finding(
            Level.YELLOW, f"u8 × s8 products of {first}{more} can saturate on x86 without VNNI", remedy
        )]
    return []


def _openvino(run: FileRun, circumstances: Circumstances) -> list[Finding]:
    level = Level.RED if circumstances.runtime == "openvino" else Level.YELLOW
    if run.total is None:
        return [Finding(level, f"OpenVINO refuses the file: {run.refusal}", "use config='openvino'")]
    if agrees(run):
        return []
    if circumstances.random_inputs:
        level = Level.YELLOW
    return [Finding(level, "OpenVINO's low-precision transformations change the results",
                    "use config='openvino', whose activations are symmetric int8")]


def _too_few(run: FileRun) -> Finding | None:
    """Returns what to say where one or two values alone make outputs differ; ``None`` where more do, or none."""
    far = [] if run.total is None else far_outputs(run.outputs or [run.total])
    if not far or not all(are_too_few(each, each.beyond_one_step) for each in far):
        return None
    which = f" of {far[0].name}" if run.outputs[1:] else ""
    return Finding(Level.YELLOW, f"{far[0].elements} output values{which} are too few to judge the file by",
                   "verify it on more data")


def _how_far(run: FileRun, reference: str) -> str:
    """Says how far the outputs of a run are from a reference; of several outputs, how far the farthest is."""
    which = f"output {run.least.name} is" if run.outputs[1:] else "the outputs are"
    return f"{which} {run.least.sqnr_db:.1f} dB from {reference}"


def _slower(run: FileRun) -> list[Finding]:
    latency, reference = run.latency_ms, run.float_latency_ms
    if run.way == EXACT or latency is None or reference is None or latency < reference:
        return []
    floats = [] if run.nodes is None else list(dict.fromkeys(node.op for node in run.nodes.weighted_floats))
    remedy = "the runtime does not tell which products it computes in integers" if run.nodes is None else (
        f"of its products, {', '.join(floats[:3])} {'is' if len(floats) == 1 else 'are'} in float" if floats else
        "all its products are in integers; the model may be too small to gain")
    return [Finding(Level.YELLOW, f"{run.runtime}: {latency:.3g} ms, {latency / reference:.2f} × float", remedy)]


def _is_worse(run: FileRun, than: FileRun, by_db: float = WORSE_DB) -> bool:
    """Says whether an output has more values beyond one step than in another run, and an SQNR less by ``by_db``."""
    if run.total is None or than.total is None:
        return False
    pairs = zip(run.outputs or [run.total], than.outputs or [than.total], strict=True)
    return any(other.sqnr_db - own.sqnr_db > by_db for own, other in pairs
               if own.beyond_one_step is None or own.beyond_one_step > 1 - WITHIN_ONE_STEP)


def _departure(wrong: Sequence[Difference], circumstances: Circumstances) -> str:
    first, *others = wrong
    how = f"{first.sqnr_db:.1f} dB from it" if first.other_codes is None or first.max_steps is None else (
        f"{first.other_codes:.2%} of its codes are others, by at most {first.max_steps:.4g} steps")
    more = f"; so do {len(others)} other ops" if others else ""
    return f": given the values of {circumstances.reference}, {first.name} departs ({how}){more}"


def _first(run: FileRun) -> str:
    departure = next((site for site in run.sites if site.max_steps is not None and site.max_steps > 1.5), None)
    return "" if departure is None else f"; the first tensor off by more than one step is {departure.name}"
