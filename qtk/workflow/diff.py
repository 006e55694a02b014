"""Compares two quantized models: encodings, codes of weights, outputs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.data.forward_pass import Batch, Forward, in_memory, outputs
from qtk.errors import EncodingError
from qtk.graph.simulation import HasSimulation
from qtk.numerics.affine import expand
from qtk.numerics.effective import effective_scale
from qtk.numerics.error import decibels
from qtk.public import public
from qtk.report.quantization_diff import OutputDifference, QuantizationDiff, SiteDifference
from qtk.torch_private import pytree
from qtk.workflow.data_report import predictions_of
from qtk.workflow.quantized_source import QuantizedSource, quantized_source

if TYPE_CHECKING:
    from qtk.runtimes.file_outputs import FileOutputs

DEFAULT = ("onnxruntime-off", "onnxruntime-off")
"""What runs two files if nothing is said."""


@public
def diff(
    first: HasSimulation | str | os.PathLike[str], second: HasSimulation | str | os.PathLike[str],
    data: Iterable[Batch] | None = None, *, forward: Forward | None = None, num_batches: int | None = None,
    runtimes: tuple[str, str] | None = None,
) -> QuantizationDiff:
    """Says what differs between two quantized models: simulations, what was written of them, or two runtimes of a file.

    >>> import qtk
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval(), torch.randn(16, 8)
    >>> first, second = qtk.QuantSim(model, x), qtk.QuantSim(model, x)
    >>> first.compute_encodings([x], progress=False)
    >>> second.compute_encodings([x], progress=False)
    >>> bool(qtk.diff(first, second))
    False
    >>> second.set_range("1:out", low=0.0, high=100.0)
    >>> [(each.site, each.change, each.steps > 1000) for each in qtk.diff(first, second).sites]
    [('1:out', 'range', True)]

    Folders of ``sim.save``, of ``sim.export``, of ``qtk quantize``, and single ``.onnx`` and ``encodings.json`` files
    are compared by the names of their sites and of the float parameters that both have, such as biases and the weights
    of norms. Outputs are compared where both run on the data: two simulations, or two ONNX files, in ONNX
    Runtime without optimizations or in the ``runtimes`` that you say, of the same file too:
    ``qtk.diff(file, file, batches, runtimes=("onnxruntime-off", "onnxruntime-on"))``.

    Args:
        first: the model from which differences are told.
        second: the other.
        data: batches; ``None``: outputs are not compared.
        forward: how to run a simulation on a batch.
        num_batches: batches to take of the data.
        runtimes: what runs the first file and what runs the second: ``onnxruntime-off`` without optimizations,
            ``onnxruntime-on`` with them, or ``openvino``; ``None``: the first.

    Raises: EncodingError if one cannot be read, or the data are given and the two do not both run; ExportError if a
        runtime is unknown or not installed, or refuses a file.
    """
    one, other = quantized_source(first), quantized_source(second)
    if runtimes is not None and (data is None or len(one.files) != 1 or len(other.files) != 1):
        raise EncodingError(f"runtimes run two single ONNX files on data; got {one.name} and {other.name}"
                            f"{', and no data' if data is None else ''}; give two .onnx files, or one twice, and data")
    differences = (*_sites(one, other), *_parameters(one, other))
    if data is None:
        return QuantizationDiff(one.name, other.name, differences)
    batches = in_memory(data, num_batches)
    if len(one.files) != 1 or len(other.files) != 1:
        return QuantizationDiff(one.name, other.name, differences, _outputs(one, other, batches, forward))
    opened = [_opened(each, name) for each, name in zip((one, other), runtimes or DEFAULT, strict=True)]
    before, after = (each.name if runtimes is None else f"{each.name} in {file.runtime}"
                     for each, file in zip((one, other), opened, strict=True))
    return QuantizationDiff(before, after, differences, _compared([_run(each, batches) for each in opened]))


def _sites(one: QuantizedSource, other: QuantizedSource) -> Iterator[SiteDifference]:
    before, after = one.specs, other.specs
    for name, spec in before.items():
        if name not in after:
            yield SiteDifference(name, "not in the second")
        elif spec != after[name]:
            yield SiteDifference(name, f"{spec} → {after[name]}")
        elif name in one.encodings and (
            found := _site(name, one.encodings[name], other.encodings[name], one.constants, other.constants)
        ) is not None:
            yield found
    yield from (SiteDifference(name, "not in the first") for name in after if name not in before)


def _parameters(one: QuantizedSource, other: QuantizedSource) -> Iterator[SiteDifference]:
    """The float parameters that both have, with other values."""
    for name, before in one.parameters.items():
        after = other.parameters.get(name)
        if after is None:
            continue
        if before.shape != after.shape:
            yield SiteDifference(name, f"float, shape {[*before.shape]} → {[*after.shape]}")
        elif before.numel():
            before, after = before.double(), after.double()
            is_other = (before != after) & ~(before.isnan() & after.isnan())
            if bool(is_other.any()):
                moved = (before - after).abs().max() / before.abs().max()
                yield SiteDifference(name, "float", flipped=int(is_other.sum()), elements=before.numel(),
                                     moved=float(moved.nan_to_num(math.inf, math.inf)))


def _site(
    name: str, before: Encoding, after: Encoding, constants: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> SiteDifference | None:
    """The difference at one site; ``None`` if there is none."""
    if before.scale.shape != after.scale.shape:
        return SiteDifference(name, f"scales {[*before.scale.shape]} → {[*after.scale.shape]}")
    ends = torch.stack([before.minimum - after.minimum, before.maximum - after.maximum]).double().abs()
    steps = float((ends.amax(0) / before.scale.double()).max()) if before.scale.numel() else 0.0
    flipped = elements = None
    if name in constants and name in others and constants[name].shape == others[name].shape:
        codes = [_codes(value[name], encoding) for value, encoding in ((constants, before), (others, after))]
        flipped, elements = int((codes[0] != codes[1]).sum()), codes[0].numel()
    changes = [*([] if before.equals(after) else ["range"]), *(["codes"] if flipped else [])]
    return SiteDifference(name, ", ".join(changes), steps, flipped, elements) if changes else None


def _codes(value: Tensor, encoding: Encoding) -> Tensor:
    """The codes of quantized values; of formats without integer codes the multiples of the scale."""
    block_size = encoding.spec.granularity.block_size(value.ndim)
    multiples = value.double() / expand(effective_scale(encoding.scale), value.shape, block_size).double()
    return multiples.bfloat16() if isinstance(encoding.spec.dtype, FloatDtype) else multiples.round()


def _outputs(
    one: QuantizedSource, other: QuantizedSource, batches: Iterable[Batch], forward: Forward | None
) -> OutputDifference:
    if one.model is not None and other.model is not None:
        models = [each.model for each in (one, other) if each.model is not None]
        runs: list[Iterator[object]] = [outputs(model, batches, forward=forward) for model in models]
    else:
        raise EncodingError("outputs are compared of two simulations, or of two single ONNX files; leave the data out, "
                            f"or give such ({one.name}, {other.name})")
    return _compared(runs)


def _compared(runs: list[Iterator[object]]) -> OutputDifference:
    """Says how far the outputs of the second run are from the outputs of the first."""
    signal = noise = 0.0
    equal = predictions = 0
    for left, right in zip(*runs, strict=True):
        values = [_values(each) for each in (left, right)]
        shapes = [[tuple(each.shape) for each in some] for some in values]
        if shapes[0] != shapes[1]:
            raise EncodingError(f"the outputs have shapes {shapes[0]} and {shapes[1]}: leave the data out, or give two "
                                "models with the same outputs")
        for a, b in zip(*values, strict=True):
            same = (a == b) | (a.isnan() & b.isnan())
            signal += float(a[a.isfinite()].square().sum())
            noise += float(torch.where(same, 0.0, a - b).square().nan_to_num(math.inf, math.inf).sum())
        classes = [predictions_of(each) for each in (left, right)]
        if classes[0] is not None and classes[1] is not None:
            equal += int((classes[0] == classes[1]).sum())
            predictions += classes[0].numel()
    sqnr = math.inf if noise == 0 else -math.inf if noise == math.inf else decibels(signal, noise)
    return OutputDifference(sqnr, equal / predictions if predictions else None, "the data given")


def _values(output: object) -> list[Tensor]:
    """The floats of an output; its integers, as classes that are predicted, where it has no floats."""
    tensors = [leaf.detach().cpu() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    floats = [each for each in tensors if each.is_floating_point()]
    return [each.double() for each in floats or tensors]


def _opened(source: QuantizedSource, runtime: str) -> FileOutputs:
    from qtk.runtimes.file_outputs import FileOutputs  # loaded here: slow to import

    return FileOutputs(next(iter(source.files.values())), runtime)


def _run(file: FileOutputs, batches: Iterable[Batch]) -> Iterator[object]:
    """The outputs of an ONNX file for each batch."""
    from qtk.workflow.verify_files import inputs_by_name

    for batch in batches:
        yield file.run(inputs_by_name(file.inputs, batch))
