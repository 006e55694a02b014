"""Runs exported files in ONNX Runtime and compares their outputs with the simulation's."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from qtk.capture.inputs import input_leaves
from qtk.capture.signature import input_names, output_nodes
from qtk.errors import ExportError
from qtk.export.onnx.session import open_session
from qtk.graph.graphs import roots
from qtk.graph.insert import quantizer_called
from qtk.numerics.affine import expand
from qtk.numerics.top1 import Top1
from qtk.quantizers.quantizer import Quantizer
from qtk.torch_private import pytree
from qtk.workflow.export import onnx_name
from qtk.workflow.forward_pass import Data, Forward, run_all


@dataclass(frozen=True, slots=True)
class Agreement:
    """The differences between a runtime's outputs and the simulation's, over all data.

    Args:
        runtime: which runtime, and with which optimizations.
        top1: share of equal argmax over the last axis of the first output; ``None`` if that has no such axis.
        differing: share of output elements that are not bit-equal.
        max_difference: the largest |runtime - simulation|.
        max_difference_scales: the largest, in scales of the output's quantizer; ``None`` without one.
    """

    runtime: str
    top1: float | None
    differing: float
    max_difference: float
    max_difference_scales: float | None

    def __str__(self) -> str:
        top1 = "" if self.top1 is None else f"top-1 equal {self.top1:.2%}, "
        scales = "" if self.max_difference_scales is None else f" ({self.max_difference_scales:.3g} scales)"
        return (f"{self.runtime}: {top1}{self.differing:.2%} of the values differ, "
                f"by at most {self.max_difference:.3g}{scales}")


@dataclass(frozen=True, slots=True)
class ExportVerification:
    """How exactly the exported files compute what the simulation does; printable.

    Args:
        path: the file, or the directory of the files of several islands.
        exact: ONNX Runtime without graph optimizations: each operator computes what ONNX defines.
        optimized: ONNX Runtime with its default optimizations, integer kernels included; ``runtime`` says if this CPU
            needs its exact mode for them.
        islands: each file by itself, if there are several.
    """

    path: Path
    exact: Agreement
    optimized: Agreement
    islands: tuple[ExportVerification, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.path}\n  {self.exact}\n  {self.optimized}", *map(str, self.islands)])


def verify_export(
    model: nn.Module, directory: str | os.PathLike[str], data: Data, *, forward: Forward | None = None
) -> ExportVerification:
    """Verifies the ONNX files in an export directory, see ``verify_onnx``; of a model with islands, file by file.

    Raises: ExportError if one is missing, or as ``verify_onnx``.
    """
    files = {Path(directory) / onnx_name(path): graph for path, graph in roots(model).items()}
    missing = next((path for path in files if not path.is_file()), None)
    if missing is not None:
        raise ExportError(f"{directory} holds no {missing.name} to verify; export with formats=('onnx',)")
    return _verify(files, model, data, forward, Path(directory))


def verify_onnx(
    path: str | os.PathLike[str], model: fx.GraphModule, data: Data, *, forward: Forward | None = None
) -> ExportVerification:
    """Compares an ONNX file in ONNX Runtime with the simulation it was exported from.

    Args:
        path: the file.
        model: the simulating model.
        data: batches, or a function that runs the model over its own.
        forward: how to run the model on a batch, where the default does not fit.

    Raises: ExportError if onnxruntime is not installed or cannot run the file; CalibrationError without any batch.
    """
    return _verify({Path(path): model}, model, data, forward, Path(path))


def _verify(
    files: Mapping[Path, fx.GraphModule], model: nn.Module, data: Data, forward: Forward | None, directory: Path
) -> ExportVerification:
    witnesses = [_Witness(graph, path) for path, graph in files.items()]
    try:
        run_all(model, data, forward=forward, label="verifying")
    finally:
        for witness in witnesses:
            witness.handle.remove()
    verified = tuple(witness.verification() for witness in witnesses)
    if len(verified) == 1:
        return verified[0]
    exact, optimized = (
        _Comparison.sum_of(pair).agreement() for pair in zip(*(w.comparisons for w in witnesses), strict=True)
    )
    return ExportVerification(directory, exact, optimized, verified)


class _Comparison:
    """A session of the file, and the differences counted so far."""

    def __init__(self, path: Path, graph: fx.GraphModule, *, optimized: bool) -> None:
        self.session, self.runtime = open_session(path, graph, optimized=optimized)
        self.names = [value.name for value in self.session.get_inputs()]
        self.top1 = Top1()
        self.differing = self.elements = 0
        self.max_difference = 0.0
        self.max_scales: float | None = None

    @classmethod
    def sum_of(cls, comparisons: Sequence[_Comparison]) -> _Comparison:
        """The sum of several files; without top-1, which is of single files."""
        total = copy.copy(comparisons[0])
        total.top1 = Top1()
        total.differing = sum(comparison.differing for comparison in comparisons)
        total.elements = sum(comparison.elements for comparison in comparisons)
        total.max_difference = max(comparison.max_difference for comparison in comparisons)
        scales = [comparison.max_scales for comparison in comparisons if comparison.max_scales is not None]
        total.max_scales = max(scales, default=None)
        return total

    def run(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        if set(self.names) != set(inputs):
            raise ExportError(f"the file takes {', '.join(self.names)}, the model {', '.join(inputs)}; "
                              "verify a file with the simulation it was exported from")
        try:
            feed = {name: inputs[name].detach().cpu().numpy() for name in self.names}
            return [torch.from_numpy(array) for array in self.session.run(None, feed)]
        except Exception as error:
            raise ExportError(f"{self.runtime} cannot run the file: {type(error).__name__}: {error}") from error

    def add(self, simulated: list[Tensor], quantizers: list[Quantizer | None], got: list[Tensor]) -> None:
        if len(got) != len(simulated):
            raise ExportError(f"the file returns {len(got)} tensors, the model {len(simulated)}; "
                              "verify a file with the simulation it was exported from")
        for index, (ours, quantizer, theirs) in enumerate(zip(simulated, quantizers, got, strict=True)):
            if ours.shape != theirs.shape:
                raise ExportError(f"{self.runtime}: output {index} has shape {tuple(theirs.shape)}, the simulation's "
                                  f"{tuple(ours.shape)}")
            ours = ours.detach().cpu()
            difference = _difference(ours, theirs)
            self.elements += difference.numel()
            self.differing += int(difference.count_nonzero())
            self.max_difference = max(self.max_difference, _largest(difference))
            if quantizer is not None and quantizer.scale is not None:
                sizes = quantizer.spec.granularity.block_size(ours.ndim)
                scales = difference / expand(quantizer.scale.detach().cpu(), ours.shape, sizes)
                self.max_scales = max(self.max_scales or 0.0, _largest(scales))
            if index == 0 and ours.ndim > 1 and ours.shape[-1] > 1:
                self.top1.add(ours, theirs.argmax(-1))

    def agreement(self) -> Agreement:
        return Agreement(
            self.runtime,
            self.top1.share,
            self.differing / max(self.elements, 1),
            self.max_difference,
            self.max_scales,
        )


class _Witness:
    """Runs the file of a graph on the inputs of each call of the graph, and counts the differences."""

    def __init__(self, graph: fx.GraphModule, path: Path) -> None:
        self.path = path
        self.graph = graph
        self.comparisons = [_Comparison(path, graph, optimized=optimized) for optimized in (False, True)]
        self.quantizers = [quantizer_called(node) for node in output_nodes(graph).values()]
        self.handle = graph.register_forward_hook(self._compare, with_kwargs=True)

    def verification(self) -> ExportVerification:
        exact, optimized = (comparison.agreement() for comparison in self.comparisons)
        return ExportVerification(self.path, exact, optimized)

    def _compare(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], outputs: object
    ) -> None:
        leaves = zip(input_names(self.graph), input_leaves(self.graph.graph, args, kwargs), strict=True)
        inputs = {name: leaf for name, leaf in leaves if isinstance(leaf, Tensor)}
        simulated = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        for comparison in self.comparisons:
            comparison.add(simulated, self.quantizers, comparison.run(inputs))


def _difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """|ours - theirs| in float64; 0 where both are the same, infinite or not a number included, else inf for NaN."""
    ours, theirs = ours.double(), theirs.double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return torch.where(same, 0.0, (ours - theirs).abs().nan_to_num(nan=torch.inf, posinf=torch.inf))


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
