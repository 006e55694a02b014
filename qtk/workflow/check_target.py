"""Checks exported files against the rules of the runtime that they are for."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qtk.config.files import shipped_names
from qtk.config.load import load_config
from qtk.config.runtime import FileFormat, Runtime, RuntimeRule
from qtk.config.schema import QuantConfig
from qtk.core.dtypes import INT32
from qtk.core.granularity import WHOLE, PerBlock, PerChannel, PerTensor, PerToken, PerTokenBlock
from qtk.core.spec import QuantSpec
from qtk.errors import ConfigError, EncodingError, ExportError
from qtk.export import encodings_json, pt2e_contents
from qtk.export.quantized_file import FileTensor, QuantizedFile, TensorRole
from qtk.public import public
from qtk.registry import did_you_mean
from qtk.runtimes.rule_check import Violation, is_checked, unchecked_fields, violations

SUFFIXES: dict[str, FileFormat] = {".onnx": "onnx", ".pt2": "pt2e", ".json": "encodings"}

ENCODINGS_FILE = "encodings.json"

LISTED = 20
"""Violations that the text of a check lists of one rule."""


@public
@dataclass(frozen=True)
class TargetCheck:
    """Holds what a check of one file found.

    Args:
        path: the file.
        runtime: the runtime whose rules were checked.
        tensors: how many quantized tensors the file has.
        violations: what breaks a rule.
        unchecked: rules about what files of this format do not say.
        partly_checked: rules that were checked but for some of their fields, each with the names of these fields.
    """

    path: Path
    runtime: Runtime
    tensors: int
    violations: tuple[Violation, ...]
    unchecked: tuple[RuntimeRule, ...] = ()
    partly_checked: tuple[tuple[RuntimeRule, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        head = f"{self.path}: {self.runtime.target} ({self.runtime.name}), {self.tensors} quantized tensors, "
        rules = len(self.runtime.rules)
        silent = [rule.name for rule in self.unchecked]
        silent += [f"{' and '.join(fields)} of {rule.name}" for rule, fields in self.partly_checked]
        head += f"{rules - len(self.unchecked)} of {rules} rules" if self.unchecked else f"{rules} rules"
        head += f" ({self.path.name} does not say: {', '.join(silent)}): " if silent else ": "
        if not self.violations:
            return head + "all kept"
        lines, seen = [], Counter[str]()
        for each in self.violations:
            seen[each.rule.name] += 1
            if seen[each.rule.name] <= LISTED:
                lines.append(f"  {each}")
        more = [f"  … {count - LISTED} more: {name}" for name, count in seen.items() if count > LISTED]
        return "\n".join([f"{head}{len(self.violations)} violations", *lines, *more])


@public
def check_target(
    path: str | os.PathLike[str], target: str | os.PathLike[str] | Mapping[str, object] | QuantConfig | None = None
) -> list[TargetCheck]:
    """Checks exported files against the rules of a runtime.

    >>> import pathlib, qtk, tempfile, torch
    >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4), config="tensorrt")
    >>> sim.compute_encodings([torch.randn(8, 4)], progress=False)
    >>> folder = pathlib.Path(tempfile.mkdtemp()) / "exported"
    >>> sim.export(folder, formats="onnx")
    >>> qtk.check_target(folder)[0].violations
    ()

    A file that was made for another target:

    >>> [check] = qtk.check_target(folder / "model.onnx", "onnxruntime")
    >>> check.violations[0].place, check.violations[0].rule.name
    ('weight', 'saturation')

    Args:
        path: an exported file, or a directory, of which the files that the runtime takes are checked.
        target: a shipped name, or the path of a config with ``runtime``; ``None``: the shipped one that the file says
            it was exported for.

    Raises: ConfigError if the target is unknown, or has no runtime; ExportError if a file cannot be read, is in no
        format that the runtime takes, says nothing of a target, or there is none.
    """
    given = Path(path)
    asked = None if target is None else _runtime_of(target)
    if not given.is_dir():
        file = _read(given)
        return [_check(given, file, asked or _runtime_in(file, given))]
    paths = sorted(each for each in given.iterdir() if each.suffix in (".onnx", ".pt2") or each.name == ENCODINGS_FILE)
    if not paths:
        inner = sorted(each.parent for depth in ("*", "*/*") for each in given.glob(f"{depth}/{ENCODINGS_FILE}"))
        way_out = f"name one of {', '.join(map(str, inner[:8]))}" if inner else "name a directory that sim.export wrote"
        raise ExportError(f"{path} holds no .onnx, .pt2 or {ENCODINGS_FILE}; {way_out}")
    files = {each: _read(each) for each in paths}
    wanted = {each: asked or _runtime_in(file, each) for each, file in files.items()}
    fitting = [each for each in paths if files[each].format in wanted[each].formats] or paths[:1]
    return [_check(each, files[each], wanted[each]) for each in fitting]


def runtimes() -> dict[str, Runtime]:
    """The shipped targets that have a runtime, by name."""
    loaded = {name: load_config(name).runtime for name in shipped_names("targets")}
    return {name: runtime for name, runtime in loaded.items() if runtime is not None}


def _check(path: Path, file: QuantizedFile, runtime: Runtime) -> TargetCheck:
    if file.format not in runtime.formats:
        raise ExportError(f"{path} is in the format {file.format!r}, and {runtime.target} ({runtime.name}) takes "
                          f"{' or '.join(runtime.formats)}; export formats={runtime.formats!r}")
    unchecked = tuple(rule for rule in runtime.rules if not is_checked(rule, file.format))
    partly = tuple((rule, tuple(sorted(fields))) for rule in runtime.rules
                   if rule not in unchecked and (fields := unchecked_fields(rule, file.format)))
    return TargetCheck(path, runtime, len(file.tensors), tuple(violations(file, runtime)), unchecked, partly)


def _runtime_in(file: QuantizedFile, path: Path) -> Runtime:
    """The runtime of the target that the file names."""
    known = runtimes()
    if file.target is None:
        raise ExportError(f"{path} does not say which target it is for; name one (--target): {', '.join(known)}")
    if file.target not in known:
        raise ConfigError(f"{path} is for the target {file.target!r}, which does not come with qtk; give the "
                          f"config it was made with, or name one of {', '.join(known)}")
    return known[file.target]


def _runtime_of(target: str | os.PathLike[str] | Mapping[str, object] | QuantConfig) -> Runtime:
    runtime = load_config(Path(target) if isinstance(target, os.PathLike) else target).runtime
    if runtime is None:
        raise ConfigError(f"the config {target!r} is for no runtime in particular, so there are no rules to check; "
                          f"targets with rules: {', '.join(runtimes())}")
    return runtime


def _read(path: Path) -> QuantizedFile:
    if not path.exists():
        raise ExportError(f"{path} does not exist; name a file or a directory that sim.export wrote")
    match SUFFIXES.get(path.suffix):
        case "onnx":
            try:
                from qtk.export.onnx import file_contents  # loaded here: onnx is an extra, and slow to import
            except ImportError as error:
                raise ExportError(f"{path} needs the package {error.name}; pip install 'qtk[onnx]'") from error
            return file_contents.read_contents(path)
        case "pt2e":
            return pt2e_contents.read_contents(path)
        case "encodings":
            return _read_encodings(path)
    raise ExportError(f"{path}: files to check end in {', '.join(SUFFIXES)}; name one that sim.export wrote")


def _read_encodings(path: Path) -> QuantizedFile:
    """The tensors of qtk's encodings; which ops read them is not in the file, so rules that name ops do not apply."""
    try:
        stored = encodings_json.parse(encodings_json.load_object(path), str(path))
        target = encodings_json.read_target(path)
    except EncodingError as error:
        raise ExportError(f"{path}: {error}") from error
    for name in stored.parameters or ():  # a mistyped name would leave its weight to be judged as an activation
        if name not in stored.encodings and name not in stored.dynamic:
            hint = did_you_mean(name, (*stored.encodings, *stored.dynamic))
            raise ExportError(f"{path}: parameters names {name}, of which the file has no encoding; "
                              f"{f'{hint} ' if hint else ''}give it one, or take the name out of parameters")
    tensors = [
        _site(name, each.spec, _role(name, each.spec, stored.parameters),
              zero=each.zero_point is None or not bool(each.zero_point.any()))
        for name, each in stored.encodings.items()
    ]
    tensors += [_site(name, spec, "activations", zero=spec.symmetric or None) for name, spec in stored.dynamic.items()]
    return QuantizedFile("encodings", target, None, tuple(tensors))


def _role(name: str, spec: QuantSpec, parameters: Mapping[str, TensorRole] | None) -> TensorRole:
    """Returns what the file says; of an older one, which does not, what name and spec suggest."""
    if parameters is not None:
        return parameters.get(name, "activations")
    # A parameter that an op quantizes for itself (a tied embedding) has the name of an edge.
    is_value = ":" in name and isinstance(spec.granularity, (PerTensor, PerToken, PerTokenBlock))
    return "activations" if is_value else "biases" if spec.dtype == INT32 else "weights"


def _site(name: str, spec: QuantSpec, role: TensorRole, *, zero: bool | None) -> FileTensor:
    blocks, granularity = None, "per_tensor"
    match spec.granularity:
        case PerTensor():
            pass
        case PerChannel():
            granularity = "per_channel"
        case PerToken():
            granularity = "per_token"
        case PerTokenBlock(length):
            granularity, blocks = "per_block", length
        case PerBlock() as each:
            granularity, cut = "per_block", [size for size in each.sizes if size != WHOLE]
            blocks = max(cut) if max(cut, default=1) > 1 or len(cut) == len(each.sizes) else None
    zero = zero and not spec.middle_code
    return FileTensor(name, role, frozenset(), spec.dtype.name, granularity, blocks, zero, None, spec.dynamic)
