"""What may make the host wait for a GPU, in the modules that observe, calibrate, simulate and train: a list, by name.

``tests/invariants/test_no_waits.py`` runs these modules on a pretended GPU; this test reads their source, for what no
run comes by.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOT = (
    "core/encoding.py", "quantizers/*.py", "observers/*.py", "calibrators/*.py", "ops/*.py",
    "kernels/gpu/*.py", "numerics/*.py", "nn/*.py", "calibration/calibrate.py", "workflow/check.py",
    "data/forward_pass.py", "training/learned_ranges.py", "calibration/local_gradients.py", "training/qat_schedule.py",
    "calibration/scale_floor.py", "data/valid_tokens.py",
)
METHODS = {
    "item",
        "tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount",
    "histc", "synchronize", "equal", "allclose", "repeat_interleave", "is_nonzero",
}
CASTS = {"bool", "int", "float"}
OF_NUMBERS = ("qmin", "qmax", "bits", "largest", "maximum", "minimum", "eps", "steps", "clipped", "levels")
"""Attributes and names that are Python numbers."""

CPU_ONLY = "only on the CPU"
ONCE = "once a calibration or an export, not once a batch"
AN_ERROR = "for the message of an error"
REPEATS = "a number of repeats that is known on the host"
ALLOWED: dict[str, dict[str, str]] = {
    "calibrators/min_max.py": {
        "bool(unseen.any())": "of ranges that all sites have sent to the host together",
        "unseen.nonzero()": AN_ERROR, "unseen.nonzero()[:8].tolist()": AN_ERROR, "int(unseen.sum())": AN_ERROR,
    },
    "calibrators/tf_enhanced_v1.py": {
        "torch.tensor([int(-steps + steps / 20 * i) for i in range(21)], dtype=torch.float64, device=low.device)":
            "once a site, " + ONCE,
    },
    "core/encoding.py": {
        "bool(self._is_valid())": "one look at an encoding that a user makes; calibrations make theirs on the CPU",
        "bool(_are_positive(self.scale).all())": AN_ERROR,
        "torch.equal(self.scale, other.scale)": "that is what is asked for",
        "torch.equal(self.zero_point, other.zero_point)": "that is what is asked for",
    },
    "nn/attention.py": {
        "key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)": REPEATS,
        "value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)": REPEATS,
    },
    "nn/batch_norm.py": {
        "float(num_batches_tracked)": "momentum=None alone, where torch's own batch norm reads it too",
    },
    "nn/mapped_weights.py": {
        "bool(_mapped(model.parameters()))": "of a list",
        "int(os.pread(self._memory, 128, 0).split()[2])": "of a text",
        "bool(self._known)": "of a list",
        "bool(_mapped([tensor]))": "of a list",
        "int((pages < 0).sum())": CPU_ONLY,
        "bool(((pages != 0) & (pages & OF_FILE == 0)).any())": CPU_ONLY,
    },
    "nn/recurrent.py": {
        "int(size)": "of a packed sequence's batch_sizes, which torch keeps on the CPU",
    },
    "ops/least_candidate.py": {
        "bool(has_many.any())": "whether a second search is needed, once for all parameters of a kind",
    },
    "ops/pack_padded.py": {"int(lengths.max())": "of the lengths of sequences, which torch wants on the CPU"},
    "numerics/bit_packing.py": {
        "flat[start:start + PIECE].to('cpu', torch.int64)": "of an export",
        "integers.to('cpu', torch.int32)": "of an export",
    },
    "numerics/clipping.py": {"int(((scaled < low) | (scaled > high)).sum())": "of a sensitivity analysis"},
    "numerics/error.py": {
        "float(reference.double().square().sum())": "of a report",
        "float((value.double() - reference.double()).square().sum())": "of a report",
    },
    "numerics/ranges.py": {
        "bool(wrong.any())": "of ranges that are on the CPU in a calibration; covering_range looks at nothing",
        "wrong.nonzero()": AN_ERROR, "wrong.nonzero()[0].tolist()": AN_ERROR, "float(low[first])": AN_ERROR,
        "float(high[first])": AN_ERROR, "int(wrong.sum())": AN_ERROR,
    },
    "numerics/scale_formats.py": {
        "torch.equal(rounded_to(present, dtype), present)": "by layer-wise methods, once a layer",
        "torch.equal((scale / unit).to(torch.float8_e4m3fn).to(torch.float32) * unit, scale)": ONCE,
    },
    "numerics/statistics.py": {"torch.bincount(places, weights, minlength=length)": CPU_ONLY},
    "numerics/top1.py": {"int((scores.argmax(-1) == labels.to(scores.device)).sum())": "of an evaluation"},
    "observers/extremes.py": {
        "bool(((low > bound) & (high < torch.inf)).all())": CPU_ONLY, "bool(seen.all())": CPU_ONLY,
        "bool((low <= FINITE_MASK).any())": CPU_ONLY,
        "int(masked.sum())": CPU_ONLY, "int(x.isnan().sum())": CPU_ONLY, "int(x.isposinf().sum())": CPU_ONLY,
        "masked.nonzero()": CPU_ONLY, "masked.nonzero()[0].tolist()": CPU_ONLY, "float(x[tuple(index)])": CPU_ONLY,
        "int(self._count)": ONCE, "int(self._sentinels)": ONCE, "bool(self._broken)": ONCE,
        "int(count)": "on the CPU, where settle has sent all together", "int(sentinels)": "as int(count)",
    },
    "observers/first_batch_histogram.py": {
        "bool(starts)": CPU_ONLY, "int(self._batches)": ONCE, "float(self._shares.sum(1).min())": ONCE,
    },
    "observers/histogram.py": {
        "torch.equal(self._low, before[0])": CPU_ONLY, "torch.equal(self._high, before[1])": CPU_ONLY,
        "torch.equal(first, self._first)": CPU_ONLY, "torch.equal(exponent, self._exponent)": CPU_ONLY,
        "torch.equal(exponent, self.exponent)": CPU_ONLY, "float(first)": CPU_ONLY, "int(first - self.first)": CPU_ONLY,
        "bool(((low < lower) | (high > upper)).any())": CPU_ONLY,
    },
    "ops/onnx_form.py": {"bool(block_size)": "of Python numbers"},
    "quantizers/flags.py": {
        "stored.pop(prefix + flag).item()": "flags of a checkpoint, on the CPU",
        "float(numbers['momentum'])": "a number",
        "bool(numbers.get(flag, False))": "a number",
    },
    "quantizers/lost_range.py": {
        "torch.stack(torch.aminmax(scale)).tolist()": "where an encoding is read, and in training on the CPU",
        "float(host[0])": "in pinned memory, once its event says that it has arrived",
        "float(host[1])": "as float(host[0])",
    },
    "quantizers/original.py": {"tensor.detach().to('cpu', copy=True)": "once a layer that a layer-wise method changes"},
    "calibration/calibrate.py": {
        "bool(((low < lower - slack) | (high > upper + slack)).any())": "once a site whose bounds the config gives",
    },
    "calibration/scale_floor.py": {"torch.equal(scale, encoding.scale)": "on the CPU, where all were sent together"},
    "data/valid_tokens.py": {
        "bool(((mask == 0) | (mask == 1)).all())": "with valid=… alone, of a mask that is not bool; which rows count "
                                                   "depends on it anyway",
    },
}


def calls_that_wait(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and source of every call that may read a tensor on the host; doctests are no calls."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(_, name)) if name in METHODS:
                yield node.lineno, ast.unparse(node)
            case ast.Call(ast.Name(name), [argument]) if name in CASTS and not _is_number(argument):
                yield node.lineno, ast.unparse(node)
            case ast.Call(ast.Attribute(_, "to"), [ast.Name("HOST") | ast.Constant("cpu"), *_]):
                yield node.lineno, ast.unparse(node)
            case ast.Call(ast.Attribute(ast.Name("torch"), "tensor" | "as_tensor")) if any(
                keyword.arg == "device" and ast.unparse(keyword.value) not in ("HOST", "'cpu'")
                for keyword in node.keywords
            ):
                yield node.lineno, ast.unparse(node)


def _is_number(argument: ast.expr) -> bool:
    names = [node.attr if isinstance(node, ast.Attribute) else node.id for node in ast.walk(argument)
             if isinstance(node, ast.Attribute | ast.Name)]
    return isinstance(argument, ast.Constant) or any(name in OF_NUMBERS for name in names)


def hot_files() -> list[Path]:
    return sorted({path for pattern in HOT for path in (ROOT / "qtk").glob(pattern)})


def unlisted(path: str, source: str) -> list[str]:
    allowed = ALLOWED.get(path, {})
    return [f"{path}:{line}: {call}" for line, call in calls_that_wait(ast.parse(source)) if call not in allowed]


@pytest.mark.medium
def test_every_call_that_may_wait_is_listed_with_its_reason() -> None:
    found = []
    for path in hot_files():
        found += unlisted(path.relative_to(ROOT / "qtk").as_posix(), path.read_text(encoding="utf-8"))
    assert found == []


def test_the_list_holds_nothing_else() -> None:
    stale = []
    for path, calls in ALLOWED.items():
        there = {call for _, call in calls_that_wait(ast.parse((ROOT / "qtk" / path).read_text(encoding="utf-8")))}
        stale += [f"{path}: {call}" for call in calls if call not in there]
    assert stale == []


@pytest.mark.parametrize("call", [
    "x.sum().item()", "x.tolist()", "bool((x > 0).any())", "float(x.max())", "int(count)", "x.cpu()", "x.to('cpu')",
    "x.to(HOST)", "x.nonzero()", "torch.equal(x, y)", "torch.bincount(x)", "x.unique()", "torch.cuda.synchronize()",
    "torch.tensor([1.0], device=x.device)", "event.synchronize()",
])
def test_a_planted_call_is_found(call: str) -> None:
    assert [found for _, found in calls_that_wait(ast.parse(f"def observe(x):\n    return {call}"))] == [call]


@pytest.mark.parametrize("call", ["float(spec.qmax)", "int(3.0)", "x.to(device)", "torch.tensor([1.0], device=HOST)"])
def test_what_cannot_wait_is_not(call: str) -> None:
    assert list(calls_that_wait(ast.parse(call))) == []
