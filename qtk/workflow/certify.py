"""Runs the files of an export in every runtime that is installed, and certifies what each computes."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from qtk.analysis.simulated_values import SimulatedValue
from qtk.data.forward_pass import read
from qtk.errors import ExportError, first_line
from qtk.public import public
from qtk.report.certificate import NAME, Certificate, CertifiedRun
from qtk.report.findings import Circumstances
from qtk.report.verdict import FileRun, Finding, Level
from qtk.runtimes.kinds import RUNTIMES, RuntimeKind
from qtk.runtimes.reference_file import (
    LiteRtReference,
    ProgramReference,
    ReferenceFile,
    random_batches,
    step_of_encoding,
)
from qtk.runtimes.session import integer_sums_saturate
from qtk.runtimes.way import usable_cpus
from qtk.workflow.verify_export import USUAL_LATENCY, LatencyRequest
from qtk.workflow.verify_files import inputs_by_name


def _onnx_reference(file: Path) -> ReferenceFile:
    from qtk.runtimes.onnx_reference import OnnxReference  # loaded here: slow to import

    return OnnxReference(file)


REFERENCES: dict[str, Callable[[Path], ReferenceFile]] = {
    ".onnx": _onnx_reference, ".pt2": ProgramReference, ".tflite": LiteRtReference,
}
"""Suffix → what makes a file the reference; the first that a directory has, and whose runtime is installed, is it."""

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")
"""Instruction sets that decide how integer products are added up."""

Batches = Sequence[tuple[Mapping[str, Tensor], list[SimulatedValue], dict[tuple[str, int], SimulatedValue]]]
"""The inputs by name, the outputs and the values of the sites, of each batch."""


@public
def certify(
    directory: str | os.PathLike[str], data: Iterable[object] | None = None, *,
    latency: LatencyRequest = USUAL_LATENCY, progress: bool = True,
) -> Certificate:
    """Returns what every installed runtime computes of the files in a directory.

    The reference is what one of the files defines: ``model.onnx`` without optimizations, else ``model.pt2`` in torch,
    else ``model.tflite`` by LiteRT's reference kernels. ``sim.verify_export`` compares with the simulation itself.

    Args:
        directory: what ``sim.export`` wrote.
        data: batches, each a tensor, a tuple or a dict; ``None``: random values within the ranges of the inputs.
        latency: the latency to measure.
        progress: show bars where it takes longer than seconds.

    Raises: ExportError if there is no file that an installed runtime runs, several graphs get ``data``, or the
        reference does not run on the data.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ExportError(f"{directory} is no directory; give what sim.export wrote")
    suffixes = {*REFERENCES, *(kind.suffix for kind in RUNTIMES.values())}
    files = sorted(path for path in folder.iterdir() if path.suffix in suffixes)
    stems = list(dict.fromkeys(path.stem for path in files))
    if not stems:
        raise ExportError(f"{directory} holds no file of {', '.join(REFERENCES)} to certify; export with "
                          "formats=('onnx', 'pt2e', 'litert')")
    if data is not None and stems[1:]:
        raise ExportError(f"{directory} holds the files of {len(stems)} graphs, and data fits one; leave data out")
    runs, findings, digest, names = [], [], hashlib.sha256(), []
    for stem in stems:
        beside = {path.suffix: path for path in files if path.stem == stem}
        reference = _reference(beside)
        names.append(reference.name)
        batches = _batches(reference, data)
        for inputs, _, _ in batches:
            for name, value in inputs.items():
                digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
                digest.update(value.contiguous().numpy().tobytes())
        for file, kind in tqdm(_runnable(beside), desc=f"certifying {stem}", unit="file", delay=2,
                               disable=not progress):
            certified, found = _certified(file, kind, batches, reference.name, latency, random=data is None)
            runs += certified
            findings += [f"{file.name} in {kind.title}: {each}" for each in found]
    return Certificate(
        ", ".join(dict.fromkeys(names)), digest.hexdigest(), hashes_of(folder), _versions(), _cpu(), tuple(runs),
        tuple(findings),
        {kind.title: kind.missing for kind in RUNTIMES.values() if kind.missing is not None},
    )


def _reference(beside: Mapping[str, Path]) -> ReferenceFile:
    absent = []
    for suffix, load in REFERENCES.items():
        if suffix in beside:
            missing = [kind for kind in RUNTIMES.values() if kind.suffix == suffix and kind.missing is not None]
            if suffix == ".pt2" or len(missing) < sum(kind.suffix == suffix for kind in RUNTIMES.values()):
                return load(beside[suffix])
            absent.append(f"pip install 'qtk[{missing[0].extra}]'")
    if not REFERENCES.keys() & beside.keys():
        raise ExportError(f"{', '.join(path.name for path in beside.values())} has no file beside it that gives the "
                          "reference values; export with formats=('onnx', …) or ('pt2e', …) too")
    raise ExportError(f"no runtime is installed that runs {', '.join(path.name for path in beside.values())}; "
                      f"{' or '.join(absent)}")


def _batches(reference: ReferenceFile, data: Iterable[object] | None) -> Batches:
    names = [each.name for each in reference.inputs]
    made = random_batches(reference.inputs, reference.encodings) if data is None else [
        inputs_by_name(names, batch) for batch in read(data)]
    if not made:
        raise ExportError("no batches to certify the files on; give data with at least one")
    batches = []
    for inputs in made:
        outputs, sites = reference.values(inputs)
        outputs_of = reference.output_encodings
        steps = outputs_of if len(outputs_of) == len(outputs) else [None] * len(outputs)
        batches.append((inputs, [
            SimulatedValue(value, step_of_encoding(value, step)) for value, step in zip(outputs, steps, strict=True)
        ], {key: SimulatedValue(value, step_of_encoding(value, reference.encodings.get(key[0])))
            for key, value in sites.items()}))
    return batches


def _runnable(beside: Mapping[str, Path]) -> list[tuple[Path, RuntimeKind]]:
    """Each file with each installed runtime that runs it; where one run serves several runtimes, with the first."""
    found: dict[tuple[Path, object], RuntimeKind] = {}
    for kind in RUNTIMES.values():
        if kind.missing is None and kind.suffix in beside:
            found.setdefault((beside[kind.suffix], kind.open), kind)
    return [(file, kind) for (file, _), kind in found.items()]


def _certified(
    file: Path, kind: RuntimeKind, batches: Batches, reference: str, latency: LatencyRequest, *, random: bool
) -> tuple[list[CertifiedRun], tuple[Finding, ...]]:
    """The runs of a file in a runtime, and what is worth knowing of them."""
    try:
        runs = kind.open(file, {}, latency.threads)
    except Exception as error:  # whatever the runtime says
        return _refused(file, kind, str(error) if isinstance(error, ExportError) else first_line(error))
    try:
        for inputs, outputs, sites in batches:
            runs.compare(inputs, outputs, sites)
        if latency.turns and kind.untimed is None:
            runs.measure(batches[0][0], None, turns=latency.turns, progress=False, batch_size=latency.batch_size)
        results: tuple[FileRun, ...] = runs.runs()
    except ExportError as error:
        return _refused(file, kind, str(error))
    finally:
        runs.close()
    circumstances = Circumstances(kind.name, integer_sums_saturate(), kind.saturating(file), random_inputs=random,
                                  reference=reference)
    findings = kind.judge(results, circumstances)
    level = next((each for each in (Level.RED, Level.YELLOW) if each in {one.level for one in findings}), Level.GREEN)
    return [CertifiedRun.of(file.name, run, level) for run in results], findings


def _refused(file: Path, kind: RuntimeKind, why: str) -> tuple[list[CertifiedRun], tuple[Finding, ...]]:
    """A file that a runtime does not run: yellow, for what a directory holds need not be for all runtimes."""
    finding = Finding(Level.YELLOW, why, f"export it for one of the targets {', '.join(kind.targets)}")
    return [CertifiedRun(file.name, kind.title, kind.title, Level.YELLOW.value, refusal=why)], (finding,)


def hashes_of(directory: str | os.PathLike[str]) -> dict[str, str]:
    """Name → SHA-256 of every file of a directory but the certificate and hidden ones.

    A directory that is one file of a runtime has the names ``model.aimodel/…``.
    """
    suffixes, folder = {kind.suffix for kind in RUNTIMES.values()}, Path(directory)
    listed = [path for path in folder.iterdir() if path.name != NAME and not path.name.startswith(".")]
    inside = [inner for path in listed if path.is_dir() and path.suffix in suffixes for inner in path.rglob("*")]
    return {path.relative_to(folder).as_posix(): _sha256(path) for path in sorted([*listed, *inside]) if path.is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else (
            hashlib.sha256(file.read()).hexdigest())


def _versions() -> dict[str, str]:
    """Package → version, of qtk, torch and what the runtimes need."""
    packages = ["qtk", "torch", *(pip for kind in RUNTIMES.values() for pip in kind.packages.values())]
    versions = {"python": platform.python_version()}
    for package in dict.fromkeys(packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _cpu() -> dict[str, str]:
    """The processor: its name, its instruction sets of integers, the threads that this process may use."""
    model, flags = platform.processor() or platform.machine(), list[str]()
    listed = Path("/proc/cpuinfo")
    if listed.is_file():
        lines = dict(line.split(":", 1) for line in listed.read_text(encoding="utf-8").splitlines() if ":" in line)
        values = {key.strip().lower(): value.strip() for key, value in lines.items()}
        model = values.get("model name", model)
        flags = (values.get("flags") or values.get("features") or "").split()
    return {"model": model, "flags": " ".join(flag for flag in FLAGS if flag in flags), "threads": str(usable_cpus())}
