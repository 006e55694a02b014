"""The tables in docs/targets.md, from the shipped targets: widths, by their plans and rules, and fused chains of ops.

``python docs/hooks/target_table.py`` writes them into the page; a test compares the page with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import nn

import qtk
from qtk.config.files import shipped_names
from qtk.config.load import load_config
from qtk.config.runtime import Runtime
from qtk.core.block_formats import BLOCK_FORMATS
from qtk.core.dtypes import FloatDtype
from qtk.core.granularity import PerBlock
from qtk.errors import ExportError
from qtk.export.onnx.storage_types import BLOCK_OPSET, storage_type
from qtk.export.quantized_file import FileTensor, QuantizedFile
from qtk.runtimes.rule_check import violations

PAGE = Path(__file__).resolve().parents[1] / "targets.md"
WIDTHS = {"16 bits": ("int16", "uint16"), "8 bits": ("int8", "uint8"), "4 bits": ("int4", "uint4"),
          "2–3 bits": ("int3", "uint3"), "FP8": ("fp8_e4m3", "fp8_e5m2"), "FP4": ("nvfp4", "mxfp4")}
BLOCKS = (16, 32, 64, 128, 256)
REDUCED = (-64, 64)
ROLES = ("weights", "activations")
FORMULA_ENDS = frozenset({"softmax", "addcmul", "rsqrt", "div"})
"""The last ops of chains that spell a formula out: attention, the cell of an LSTM, norms."""


def candidates(role: str, name: str) -> Iterator[FileTensor]:
    """Yields a linear layer's tensors of one format: each granularity, with and without zero points, static or not."""
    blocks = BLOCK_FORMATS.get(name)
    if blocks is not None:
        yield FileTensor("", role, frozenset({"linear"}), blocks.dtype.name, "per_block", blocks.length,
                         zero_points_are_0=True, dynamic=role == "activations")
        return
    codes = qtk.dtype(name)
    is_float = name.startswith("fp")
    limits = None if is_float else (int(codes.minimum) + codes.signed, int(codes.maximum))   # narrow
    plain = FileTensor("", role, frozenset({"linear"}), name, "per_tensor", codes=limits)
    zeros = (True,) if is_float else (True, False)
    kinds: list[tuple[str, int | None, bool]] = [("per_tensor", None, False)]
    if role == "weights":
        kinds += [("per_channel", None, False), *(("per_block", size, False) for size in BLOCKS)]
    else:
        kinds += [("per_tensor", None, True), ("per_token", None, True)]
    for (kind, size, dynamic), at_zero in product(kinds, zeros):
        yield replace(plain, granularity=kind, block_size=size, dynamic=dynamic, zero_points_are_0=at_zero)
        if role == "weights" and name == "int8":
            yield replace(plain, granularity=kind, block_size=size, zero_points_are_0=at_zero, codes=REDUCED)


def in_file(runtime: Runtime | None, role: str, name: str) -> str | None:
    """The format that holds the codes of a format in the runtime's files; ``None`` if there is none.

    >>> runtime = load_config("onnxruntime").runtime
    >>> in_file(runtime, "weights", "int3"), in_file(runtime, "activations", "uint4")
    ('int4', 'uint8')
    >>> in_file(runtime, "weights", "mxfp4") is None
    True
    """
    if runtime is None or "onnx" not in runtime.formats:
        return name
    blocks = BLOCK_FORMATS.get(name)
    codes = qtk.dtype(name) if blocks is None else blocks.dtype
    try:
        stored = storage_type(codes, opset=BLOCK_OPSET, stored=role == "weights")
    except ExportError:
        return None
    return name if isinstance(codes, FloatDtype) else stored.name.lower()


def allowed(runtime: Runtime | None, role: str, name: str | None) -> list[FileTensor]:
    """The candidates with which a file keeps the rules of the runtime."""
    return [] if name is None else [
        tensor for tensor in candidates(role, name)
        if runtime is None or not violations(QuantizedFile("pt2e", None, None, (tensor,)), runtime)]


def planned(target: str) -> dict[str, tuple[str, str]]:
    """Role → format and granularity that the target itself gives the first of two linear layers of 128 inputs."""
    model, x = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)).eval(), torch.randn(2, 128)
    sites = {str(site): plan.spec for site, plan in qtk.QuantSim(model, x, config=target).plan.items()}
    specs = {"weights": sites.get("0.weight"), "activations": sites.get("input:input", sites.get("0:in[0]"))}
    texts = {}
    for role, spec in specs.items():
        if spec is not None:
            kind = str(spec.granularity).partition("(")[0]
            size = max(spec.granularity.sizes) if isinstance(spec.granularity, PerBlock) else None
            texts[role] = (spec.dtype.name, granularity(kind, size, dynamic=spec.dynamic))
    return texts


def granularity(kind: str, size: int | None = None, *, dynamic: bool = False) -> str:
    """A granularity in words: what has a scale of its own."""
    words = kind.removeprefix("per_") + (f" of {size}" if size is not None else "")
    return f"{words} (dynamic)" if dynamic and size is None else words


def granularities(found: list[FileTensor]) -> str:
    """All granularities of the candidates, block lengths listed once; without their lengths if every one is allowed."""
    texts = [granularity(each.granularity, dynamic=each.dynamic) for each in found if each.block_size is None]
    sizes = sorted({each.block_size for each in found if each.block_size is not None})
    if sizes:
        texts.append("block" if set(BLOCKS) <= set(sizes) else f"block of {', '.join(map(str, sizes))}")
    return ", ".join(dict.fromkeys(texts))


def cell(found: Mapping[str, list[FileTensor]], names: Sequence[str]) -> str:
    """Names the allowed formats of a file, with "as" where ``names`` say another; int8 with its limit if it has one."""
    texts = []
    for name, tensors in found.items():
        if tensors:
            only_reduced = name == "int8" and {each.codes for each in tensors} == {REDUCED}
            texts.append(f"{name} (±{REDUCED[1]})" if only_reduced else name)
    return ("" if set(found) <= set(names) else "as ") + ", ".join(texts) if texts else "–"


def row(target: str, role: str) -> list[str]:
    """One line of a table: the target, what it does by itself, formats by width, granularities, zero points."""
    runtime = load_config(target).runtime
    found, cells = {}, []
    for width, names in WIDTHS.items():
        stored = dict.fromkeys(filter(None, (in_file(runtime, role, name) for name in names)))
        found[width] = {name: allowed(runtime, role, name) for name in stored}
        cells.append(cell(found[width], names))
    every = [each for names in found.values() for tensors in names.values() for each in tensors]
    zero_points = "yes" if any(each.zero_points_are_0 is False for each in every) else "no" if every else ""
    own = ", ".join(planned(target).get(role, ("float",)))
    return [f"`{target}`", own, *cells, granularities(every) or "–", zero_points or "–"]


def table(role: str) -> str:
    """The table of weights or of activations, in Markdown."""
    head = ["target", "by itself", *WIDTHS, "a scale for each", "zero points"]
    rows = [row(target, role) for target in shipped_names("targets")]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def fused(target: str) -> tuple[list[str], list[str]]:
    """Chains of a layer and what is fused behind it, and the last ops of fused formulas.

    Chains with a batch norm behind the layer are left out: each stands there without it, too.

    >>> fused("litert")[0]
    ['conv, conv_transpose, linear, add, batch_norm → relu, relu6, hardtanh']
    """
    layers: dict[str, None] = {}
    formulas: dict[str, None] = {}
    for pattern in load_config(target).supergroups:
        links = [(link,) if isinstance(link, str) else link for link in pattern]
        if set(links[-1]) <= FORMULA_ENDS:
            formulas |= dict.fromkeys(links[-1])
        elif all("batch_norm" not in link for link in links[1:]):
            layers[" → ".join(", ".join(link) for link in links)] = None
    return [*layers], [*formulas]


def fused_table() -> str:
    """The table of fused chains, in Markdown: targets with the same chains share a row."""
    base = fused("default")[0]
    rows: dict[tuple[str, str], list[str]] = {}
    for target in sorted(shipped_names("targets"), key=lambda name: name != "default"):
        layers, formulas = fused(target)
        if target != "default" and layers[: len(base)] == base:
            layers = ["as `default`", *layers[len(base):]]
        cells = "; ".join(layers) or "nothing", ", ".join(formulas) or "–"
        if cells[0] == "as `default`":
            cells = "; ".join(base), cells[1]
        rows.setdefault(cells, []).append(f"`{target}`")
    head = ["target", "layer → what is computed with it", "formulas, by their last op"]
    lines = [[", ".join(targets), *cells] for cells, targets in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def written(page: str) -> str:
    """The page with its three tables as they are now."""
    for role in (*ROLES, "fused"):
        begin, end = f"<!-- {role}:begin, python docs/hooks/target_table.py writes it -->\n", f"<!-- {role}:end -->"
        before, found, rest = page.partition(begin)
        assert found, begin
        text = fused_table() if role == "fused" else table(role)
        page = f"{before}{begin}\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
