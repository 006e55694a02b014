"""An exported file as a reference: what it defines, without a simulation, for other runtimes to be compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from qtk.core.encoding import Encoding
from qtk.export import pt2e
from qtk.export.litert.file import file_sites
from qtk.export.litert.flatbuffer import DEQUANTIZE, DTYPES, LiteRtModel
from qtk.export.repeated_ops import is_dequantize
from qtk.graph.sites import SITE, label
from qtk.numerics.affine import expand
from qtk.runtimes.litert_file import LiteRtFile
from qtk.runtimes.program_inputs import ProgramInputs
from qtk.torch_private import pytree

RANDOM_BATCHES, RANDOM_ROWS, FREE_LENGTH = 4, 8, 8


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input of a file: its name, its shape, ``None`` where the length is free, and its dtype."""

    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype


class ReferenceFile(Protocol):
    """A file that defines what others are compared with."""

    @property
    def name(self) -> str:
        """Returns what computes the reference, in words."""

    @property
    def inputs(self) -> Sequence[InputTensor]:
        """The inputs, in order."""

    @property
    def encodings(self) -> Mapping[str, Encoding]:
        """Name of a site → encoding."""

    @property
    def output_encodings(self) -> Sequence[Encoding | None]:
        """Of each output, where its values are the values of a site."""

    def values(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[tuple[str, int], Tensor]]:
        """The outputs, and the values of the sites by name and ordinal."""


class ProgramReference:
    """A ``.pt2`` file, run op by op by torch. Raises: ExportError if it is no exported program."""

    name = "the exported program in torch"

    def __init__(self, file: Path) -> None:
        self._program = ProgramInputs(file)
        self._module: Any = self._program.program.module()
        self.encodings = pt2e.read(file)
        self.output_encodings: list[Encoding | None] = [
            self.encodings.get(name or "") for name in self._output_sites()]
        values = {node.name: node.meta["val"] for node in self._program.program.graph.find_nodes(op="placeholder")}
        self.inputs = [
            InputTensor(name, tuple(size if isinstance(size, int) else None for size in values[name].shape),
                        values[name].dtype) for name in self._program.names
        ]

    def values(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[tuple[str, int], Tensor]]:
        args, kwargs = self._program.call(inputs)
        recorder = _SiteRecorder(self._module)
        with torch.no_grad():
            result = recorder.run(*pytree.tree_leaves((args, kwargs)))
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)], recorder.sites


    def _output_sites(self) -> list[str | None]:
        """Of each output the site that it is the value of."""
        program = self._program.program
        nodes = {node.name: node for node in program.graph.nodes}
        return [label(nodes[name], SITE) if is_dequantize(nodes[name]) else None
                for name in program.graph_signature.user_outputs if name in nodes]


class LiteRtReference:
    """A ``.tflite`` file, by LiteRT's reference kernels. Raises: ExportError as ``LiteRtFile``."""

    name = "LiteRT's reference kernels"

    def __init__(self, file: Path) -> None:
        self._file, model = LiteRtFile(file, {}, reference=True), LiteRtModel.load(file)
        self.encodings = {site.name: site.encoding for site in file_sites(model)}
        tensors = model.tensors
        self.output_encodings = _output_encodings(model)
        self.inputs = [
            InputTensor(name, tensors[index].shape, torch.float32 if tensors[index].scale is not None
                        else DTYPES[tensors[index].kind]) for name, index in model.inputs.items()
        ]

    def values(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[tuple[str, int], Tensor]]:
        rows = self._file.run(inputs)
        return [rows[name][0] for name in self._file.outputs], {}


def _output_encodings(model: LiteRtModel) -> list[Encoding | None]:
    """Of each output the encoding of the site that it is the codes of, or the dequantized values."""
    by_tensor = {site.tensor.index: site.encoding for site in file_sites(model)}
    dequantized = {op.outputs[0]: op.inputs[0] for op in model.ops if op.kind == DEQUANTIZE}
    return [by_tensor.get(dequantized.get(index, index)) for index in model.outputs.values()]


class _SiteRecorder(fx.Interpreter):
    """Runs a program, and keeps what the first dequantize op of each site returns."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.sites: dict[tuple[str, int], Tensor] = {}

    def run_node(self, node: fx.Node) -> Any:
        result, name = super().run_node(node), label(node, SITE)
        if node.op == "call_function" and is_dequantize(node) and name is not None:
            self.sites.setdefault((name, 0), result)
        return result


def random_batches(inputs: Sequence[InputTensor], encodings: Mapping[str, Encoding]) -> list[dict[str, Tensor]]:
    """Values uniform within the range of each input's encoding, normal where it has none; integers are 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(RANDOM_BATCHES):
        batch = {}
        for each in inputs:
            sizes = [size if size is not None else RANDOM_ROWS if axis == 0 else FREE_LENGTH
                     for axis, size in enumerate(each.shape)]
            encoding = encodings.get(f"{each.name}:input")
            if not each.dtype.is_floating_point:
                batch[each.name] = torch.randint(2, sizes, generator=generator).to(each.dtype)
            elif encoding is None:
                batch[each.name] = torch.randn(sizes, generator=generator).to(each.dtype)
            else:
                low, high = float(encoding.minimum.min()), float(encoding.maximum.max())
                batch[each.name] = (torch.rand(sizes, generator=generator) * (high - low) + low).to(each.dtype)
        batches.append(batch)
    return batches


def step_of_encoding(value: Tensor, encoding: Encoding | None) -> Tensor | None:
    """The scale of a value, in a shape that broadcasts against it; ``None`` without an encoding."""
    if encoding is None:
        return None
    return expand(encoding.scale, value.shape, encoding.spec.granularity.block_size(value.ndim))
