"""Weights as the codes of their quantizers, in as many bits as these have: which can be, and what comes back.

A weight is packed if nothing is lost for the simulation: one quantizer alone reads it, and what the codes dequantize to
is, bit for bit, what this quantizer makes of the weight and of that value itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from qtk.capture.prepared_model import PreparedModel
from qtk.capture.verify_prepared import eval_outcome
from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, ExportError
from qtk.graph.graphs import graphs, roots
from qtk.graph.insert import quantizer_nodes
from qtk.graph.parameter_readers import memory_of, parameter_readers
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, label
from qtk.nn.eval_mode import evaluating
from qtk.numerics import minifloat
from qtk.numerics.bit_packing import pack_bits, packed_bytes, unpack_bits
from qtk.numerics.codes import codes_of, storage_dtype, values_of
from qtk.operators.targets import attribute, kept_batch_norm_called
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.torch_private import pytree

LISTED = 10
"""Weights that a warning lists."""

WHOLE_BITS = (8, 16)
"""Widths of codes that have a dtype, and keep the shape of the weight in the file."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight in a file.

    Args:
        spec: how it is quantized.
        quantizer: module path of its quantizer.
        codes: 8 and 16 bits in a dtype of that width, in the shape of the weight; others uint8 [bytes].
    """

    spec: QuantSpec
    quantizer: str
    codes: Tensor


def packed_weights(simulation: Simulation, state: Mapping[str, Tensor]) -> dict[str, PackedWeight]:
    """The weights that can be packed, by the first of their names in ``state``, the tensors of the model.

    Warns of quantized weights that stay in float, each with its reason.

    Raises: ExportError if no weight can be packed, or Python code of the model reads one of them too.
    """
    packed: dict[str, PackedWeight] = {}
    reasons: dict[str, str] = {}
    restored: dict[str, Tensor] = {}
    model = simulation.model
    paths = {module: path for path, module in model.named_modules() if isinstance(module, Quantizer)}
    names, readers = _names(state), parameter_readers(model)
    with evaluating(model), torch.no_grad():
        for site, source, quantizer in _static_calls(simulation):
            reason = _reason(source, quantizer, names, readers)
            if reason is None:
                (name,) = names[memory_of(_value(source))]
                if name in packed:
                    continue
                codes, value = packed_codes(_value(source), quantizer)
                if value is None:
                    reason = "its codes do not give back what it simulates: it holds infinities or NaN, or numbers "\
                             "that its dtype rounds away"
                else:
                    packed[name] = PackedWeight(quantizer.spec, paths[quantizer], codes)
                    if "" not in roots(model):
                        restored[name] = value
            if reason is not None:
                reasons[site] = reason
    _warn(reasons, packed)
    if restored:
        _check_python(model, state, restored)
    return packed


def packed_codes(weight: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor | None]:
    """The codes of a weight as a file holds them, and what they are restored to; ``None`` if that is not the same.

    Shape: ``weight`` any; the codes as ``PackedWeight`` says; the value as ``weight``, same dtype.
    """
    encoding = quantizer.encoding
    assert encoding is not None
    weight = weight.detach()
    codes = _packed(codes_of(weight, encoding.to(weight.device)).cpu(), encoding.spec)
    value = unpacked(codes, encoding.to(torch.device("cpu")), weight.shape).to(weight)
    simulated = quantizer(weight)
    return codes, value if torch.equal(value, simulated) and torch.equal(quantizer(value), simulated) else None


def restored_weight(name: str, how: object, state: Mapping[str, Tensor], kind: object) -> Tensor:
    """A weight as it is restored from the tensors of a file.

    Args:
        name: of the weight.
        how: its JSON record: ``spec``, and ``quantizer``, the path of its quantizer.
        state: name → tensor in the file; the tensor of the weight holds its codes.
        kind: name of its dtype, and its shape.

    Raises: EncodingError naming the weight if the record is malformed, or the tensors do not fit.
    """
    try:
        match how, kind:
            case {"spec": dict(spec), "quantizer": str(path)}, [str(dtype), list(shape)]:
                quantizer = Quantizer(QuantSpec.from_json(spec), site=name)
            case _:
                raise EncodingError(f"not the record of a packed weight: {how!r:.120}")
        prefix = f"{path}."
        quantizer.load_state_dict({key.removeprefix(prefix): each for key, each in state.items()
                                   if key.startswith(prefix)})
        encoding = quantizer.encoding
        if encoding is None:
            raise EncodingError("its encoding is missing")
        return unpacked(state[name], encoding, shape).to(getattr(torch, dtype))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise EncodingError(f"{name} cannot be restored from its codes: {error}") from error


def unpacked(codes: Tensor, encoding: Encoding, shape: Sequence[int]) -> Tensor:
    """Dequantizes the codes of a file to float32. Shape: ``codes`` as ``PackedWeight`` says; result ``shape``.

    Raises: EncodingError if ``codes`` are not so many, or of another dtype.
    """
    spec, count = encoding.spec, torch.Size(shape).numel()
    whole = spec.dtype.bits in WHOLE_BITS
    expected = (storage_dtype(spec), tuple(shape)) if whole else (torch.uint8, (packed_bytes(count, spec.dtype.bits),))
    if (codes.dtype, tuple(codes.shape)) != expected:
        raise EncodingError(f"{spec.dtype} codes of a tensor of shape {tuple(shape)} are {expected[0]} of shape "
                            f"{expected[1]}, got {codes.dtype} of {tuple(codes.shape)}")
    if isinstance(spec.dtype, FloatDtype) and not whole:
        bits = unpack_bits(codes, spec.dtype.bits, count, signed=False)
        codes = minifloat.from_bits(bits, spec.dtype).reshape(shape)
    elif not whole:
        codes = unpack_bits(codes, spec.dtype.bits, count, signed=spec.dtype.signed).reshape(shape)
    return values_of(codes, encoding)


def _packed(codes: Tensor, spec: QuantSpec) -> Tensor:
    if spec.dtype.bits in WHOLE_BITS:
        return codes.contiguous()
    bits = minifloat.to_bits(codes.float(), spec.dtype) if isinstance(spec.dtype, FloatDtype) else codes
    return pack_bits(bits, spec.dtype.bits)


def _static_calls(simulation: Simulation) -> Iterator[tuple[str, fx.Node, Quantizer]]:
    """Site, source and quantizer of every call that quantizes parameters, without int32 biases."""
    static = {site.name for site, decided in simulation.plan.items() if decided.static and decided.factors is None}
    for graph in graphs(simulation.model).values():
        for node, quantizer in quantizer_nodes(graph).items():
            site = label(node, SITE)
            if site in static:
                yield str(site), node.all_input_nodes[0], quantizer


def _reason(
    source: fx.Node, quantizer: Quantizer, names: Mapping[object, Sequence[str]],
    readers: Mapping[object, set[Quantizer | None]],
) -> str | None:
    """Says why what a quantizer reads cannot be packed; ``None`` if it can, as far as its readers go."""
    if source.op != "get_attr":
        if any(kept_batch_norm_called(user) is not None for node in source.all_input_nodes for user in node.users):
            return "its batch norm is live, and both are trained on; run qtk.fold_batch_norms(sim) first"
        return "it is computed from parameters, not one itself"
    if quantizer.mode is not Mode.SIMULATE:
        return f"its quantizer is in Mode.{quantizer.mode.name}; set Mode.SIMULATE"
    if quantizer.scale is None:
        return "it has no encoding; run sim.compute_encodings(data) first"
    value = _value(source)
    held = names.get(memory_of(value), ())
    if not value.numel() or len(held) != 1:
        return f"its memory is held by {' and '.join(held)}" if held else "it is no tensor of the model's state"
    if readers[memory_of(value)] != {quantizer}:
        return "it is read in another format, or in float, by other ops too"
    return None


def _value(source: fx.Node) -> Tensor:
    owner = source.graph.owning_module
    assert owner is not None
    value = attribute(owner, str(source.target))
    assert isinstance(value, Tensor)
    return value


def _names(state: Mapping[str, Tensor]) -> dict[object, list[str]]:
    """Memory → the first name of each tensor in it; tied ones are one."""
    names: dict[object, dict[object, str]] = {}
    for name, tensor in state.items():
        view = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        names.setdefault(memory_of(tensor), {}).setdefault(view, name)
    return {memory: list(views.values()) for memory, views in names.items()}


def _warn(reasons: Mapping[str, str], packed: Mapping[str, PackedWeight]) -> None:
    """Raises: ExportError if nothing is packed."""
    listed = [f"{site}: {reason}" for site, reason in list(reasons.items())[:LISTED]]
    listed += [f"and {len(reasons) - LISTED} more"] if len(reasons) > LISTED else []
    if not packed:
        raise ExportError("\n  ".join(["weights='integer' would have no effect; no quantized weight can be stored as "
                                       "codes, save(weights='float') instead:", *listed]))
    if reasons:
        warnings.warn("\n  ".join(["these quantized weights are saved in float:", *listed]), stacklevel=5)


def _check_python(model: nn.Module, state: Mapping[str, Tensor], restored: Mapping[str, Tensor]) -> None:
    """Checks that a model whose Python is kept computes the same from restored weights, which code may read anywhere.

    Raises: ExportError if its outputs on its example inputs differ.
    """
    assert isinstance(model, PreparedModel)
    calls = model.examples
    expected = [_outputs(model, call.args, call.kwargs) for call in calls]
    originals = {name: state[name].clone() for name in restored}
    try:
        for name, value in restored.items():
            state[name].copy_(value)
        equal = all(torch.equal(*pair) for call, outputs in zip(calls, expected, strict=True)
                    for pair in zip(outputs, _outputs(model, call.args, call.kwargs), strict=True))
    finally:
        for name, value in originals.items():
            state[name].copy_(value)
    if not equal:
        raise ExportError("with its weights restored from codes the model computes something else: Python code of it "
                          f"reads some of {', '.join(list(restored)[:LISTED])} in float too; save(weights='float')")


def _outputs(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Tensor]:
    output = eval_outcome(model, args, kwargs).output
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
