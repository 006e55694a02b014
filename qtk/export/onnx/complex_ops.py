"""Operators on complex numbers as operators on pairs of real numbers, which ONNX has.

torch's exporter holds a complex tensor as real parts and imaginary parts along a last axis, and translates few of the
operators that read one. The others are written here through ``view_as_real``; a product is three or four real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, fx
from torch.nn.functional import pad

from qtk.errors import ExportError
from qtk.export.file_signature import FileSignature
from qtk.export.onnx.untranslated_ops import is_complex, reads_complex
from qtk.torch_private import is_composed

Written: TypeAlias = Callable[..., object]
Size: TypeAlias = int | torch.SymInt

_ATEN = torch.ops.aten


_REAL_FORMS = {
    "input": "let the model take torch.view_as_real({}) and call torch.view_as_complex on it",
    "output": "let the model return torch.view_as_real({})",
    "state": "hold torch.view_as_real({}) in the buffer",
}


def check_signature(signature: FileSignature) -> None:
    """Raises: ExportError for a complex input, output or state, which ONNX Runtime cannot take or return."""
    states = {name for pair in signature.buffers.values() for name in pair}
    for kind, values in (("input", signature.inputs), ("output", signature.outputs)):
        for name, node in values.items():
            if is_complex(node):
                role = "state" if name in states else kind
                raise ExportError(
                    f"the {role} {name} is complex, and ONNX Runtime takes and returns no complex numbers; "
                    f"{_REAL_FORMS[role].format(name)}, or export formats=('pt2e',), a program that torch runs")


def write_parts(graph: fx.Graph) -> None:
    """Lets the ops of ``graph`` that read or make complex numbers compute with their parts. In place."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in OF_COMPLEX and (is_complex(node) or reads_complex(node)):
            node.target = _either(node.target)


def _either(op: Callable[..., object]) -> Written:
    """An operator of complex numbers written out, or as it is where it is not written."""

    def parts(*args: object, **kwargs: object) -> object:
        result = OF_COMPLEX[op](*args, **kwargs)
        return op(*args, **kwargs) if result is NotImplemented else result

    return parts


def _moving(move: Callable[..., object]) -> Written:
    """An operator that moves elements: ``move`` on parts, ``NotImplemented`` for real numbers."""

    def written(x: Tensor, *args: object, **kwargs: object) -> object:
        if not x.is_complex():
            return NotImplemented
        moved = move(torch.view_as_real(x), *args, **kwargs)
        if moved is NotImplemented:
            return moved
        if isinstance(moved, Tensor):
            return torch.view_as_complex(moved)
        assert isinstance(moved, Sequence)
        return [torch.view_as_complex(each) for each in moved]

    return written


def _axis(parts: Tensor, dim: int, *, new: int = 0) -> int:
    """The axis ``dim`` of a complex tensor in its parts. Args: new: 1 if the axis is made."""
    return dim % (parts.ndim - 1 + new)


def _padded(parts: Tensor, pads: Sequence[Size], mode: str = "constant", value: complex | None = None) -> object:
    return NotImplemented if value or mode != "constant" else pad(parts, [0, 0, *pads])  # type: ignore[list-item]


def _squeezed(parts: Tensor, dims: Sequence[int] | int | None = None) -> Tensor:
    axes = range(parts.ndim - 1) if dims is None else [dims] if isinstance(dims, int) else dims
    return parts.squeeze([_axis(parts, dim) for dim in axes])


def _gathered(parts: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    return parts.gather(_axis(parts, dim), index.unsqueeze(-1).expand(*index.shape, 2))


def _scattered(scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``scatter`` on parts, of a value and another that is put into it along an axis."""

    def written(parts: Tensor, value: Tensor, dim: int = 0, *where: object, **others: object) -> Tensor:
        return scatter(parts, _parts(value), _axis(parts, dim), *where, **others)

    return written


def _parts(x: Tensor) -> Tensor:
    """Real and imaginary parts along a new last axis."""
    return torch.view_as_real(x) if x.is_complex() else torch.stack([x, torch.zeros_like(x)], -1)


def _product(multiply: Callable[[Tensor, Tensor], Tensor]) -> Written:
    """A product that is linear in both of its values: (a + bi)(c + di) = ac − bd + (ad + bc)i."""

    def written(x: Tensor, y: Tensor) -> object:
        if not (isinstance(y, Tensor) and (x.is_complex() or y.is_complex())):
            return NotImplemented
        if x.is_complex() and y.is_complex():
            (a, b), (c, d) = (torch.view_as_real(each).unbind(-1) for each in (x, y))
            return torch.complex(multiply(a, c) - multiply(b, d), multiply(a, d) + multiply(b, c))
        if x.is_complex():
            return torch.complex(*(multiply(part, y) for part in torch.view_as_real(x).unbind(-1)))
        return torch.complex(*(multiply(x, part) for part in torch.view_as_real(y).unbind(-1)))

    return written


def _einsum(equation: str, values: Sequence[Tensor], *, path: object = None) -> object:
    """As ``aten.einsum`` of one or two values."""
    if not any(value.is_complex() for value in values) or len(values) > 2:
        return NotImplemented
    if len(values) == 1:
        parts = [torch.einsum(equation, part) for part in torch.view_as_real(values[0]).unbind(-1)]
        return torch.complex(*parts)
    return _product(lambda x, y: torch.einsum(equation, x, y))(*values)


def _divided(x: Tensor, y: Tensor, **rounding: object) -> object:
    if rounding or not x.is_complex():
        return NotImplemented
    parts = torch.view_as_real(x)
    if isinstance(y, Tensor) and y.is_complex():
        squares = torch.view_as_real(y).square().sum(-1, keepdim=True)
        return torch.view_as_complex(torch.view_as_real(x * y.conj()) / squares)
    return torch.view_as_complex(parts / (y.unsqueeze(-1) if isinstance(y, Tensor) else y))


def _sum(add: Callable[..., Tensor]) -> Written:
    """A sum or difference of which one value is real; both complex are torch's."""

    def written(x: Tensor, y: Tensor, *, alpha: float = 1) -> object:
        if not isinstance(y, Tensor) or x.is_complex() == y.is_complex():
            return NotImplemented
        return torch.view_as_complex(add(_parts(x), _parts(y), alpha=alpha))

    return written


def _filled(number: float) -> Written:
    """A new tensor of one number, whatever makes it."""

    def written(size: Sequence[Size], *, dtype: torch.dtype | None = None, **options: object) -> object:
        if dtype is None or not dtype.is_complex:
            return NotImplemented
        options = {name: option for name, option in options.items() if name == "device"}
        parts = torch.zeros([*size, 2], dtype=dtype.to_real(), **options)  # type: ignore[call-overload]
        return torch.view_as_complex(parts + torch.tensor([number, 0.0], dtype=dtype.to_real()) if number else parts)

    return written


def _zeros_like(x: Tensor, **options: object) -> object:
    return torch.view_as_complex(torch.zeros_like(torch.view_as_real(x))) if x.is_complex() else NotImplemented


def _new_zeros(x: Tensor, size: Sequence[Size], *, dtype: torch.dtype | None = None, **options: object) -> object:
    return _filled(0)(size, dtype=x.dtype if dtype is None else dtype, device=x.device)


def _where(condition: Tensor, x: Tensor, y: Tensor) -> object:
    if not (x.is_complex() or y.is_complex()):
        return NotImplemented
    return torch.view_as_complex(torch.where(condition.unsqueeze(-1), _parts(x), _parts(y)))


def _exp(x: Tensor) -> object:
    if not x.is_complex():
        return NotImplemented
    size, angle = torch.view_as_real(x).unbind(-1)
    return _polar(size.exp(), angle)


def _polar(size: Tensor, angle: Tensor) -> Tensor:
    return torch.complex(size * angle.cos(), size * angle.sin())


def _cast(x: Tensor, dtype: torch.dtype | None = None, *others: object, **options: object) -> object:
    """As ``aten.to.dtype`` and ``aten._to_copy``: of real numbers to complex ones, or between complex ones."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_complex:
        return NotImplemented
    return torch.view_as_complex(_parts(x).to(dtype.to_real()))


OF_COMPLEX: Mapping[Callable[..., object], Written] = {
    _ATEN.unsqueeze.default: _moving(lambda parts, dim: parts.unsqueeze(_axis(parts, dim, new=1))),
    **dict.fromkeys((_ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims), _moving(_squeezed)),
    _ATEN.pad.default: _moving(_padded),
    _ATEN.constant_pad_nd.default: _moving(lambda parts, pads, value=0: _padded(parts, pads, value=value)),
    **dict.fromkeys(
        (_ATEN.reshape.default, _ATEN.view.default), _moving(lambda parts, shape: parts.reshape(*shape, 2))),
    _ATEN.flatten.using_ints: _moving(
        lambda parts, start=0, end=-1: parts.flatten(_axis(parts, start), _axis(parts, end))),
    _ATEN.expand.default: _moving(lambda parts, shape, implicit=False: parts.expand(*shape, 2)),
    _ATEN.repeat.default: _moving(lambda parts, times: parts.repeat(*times, 1)),
    _ATEN.select.int: _moving(lambda parts, dim, index: parts.select(_axis(parts, dim), index)),
    _ATEN.index_select.default: _moving(lambda parts, dim, index: parts.index_select(_axis(parts, dim), index)),
    _ATEN.index.Tensor: _moving(lambda parts, indices: _ATEN.index.Tensor(parts, indices)),
    _ATEN.gather.default: _moving(_gathered),
    _ATEN.unbind.int: _moving(lambda parts, dim=0: parts.unbind(_axis(parts, dim))),
    _ATEN.chunk.default: _moving(lambda parts, count, dim=0: parts.chunk(count, _axis(parts, dim))),
    _ATEN.split.Tensor: _moving(lambda parts, size, dim=0: parts.split(size, _axis(parts, dim))),
    _ATEN.split_with_sizes.default: _moving(lambda parts, sizes, dim=0: parts.split(sizes, _axis(parts, dim))),
    _ATEN.slice_scatter.default: _moving(_scattered(torch.slice_scatter)),
    _ATEN.select_scatter.default: _moving(_scattered(torch.select_scatter)),
    **dict.fromkeys((_ATEN.matmul.default, _ATEN.mm.default, _ATEN.bmm.default), _product(torch.matmul)),
    _ATEN.einsum.default: _einsum,
    _ATEN.mul.Tensor: _product(torch.mul),
    _ATEN.div.Tensor: _divided,
    _ATEN.add.Tensor: _sum(torch.add),
    _ATEN.sub.Tensor: _sum(torch.sub),
    **dict.fromkeys((_ATEN.zeros.default, _ATEN.empty.memory_format), _filled(0)),
    _ATEN.ones.default: _filled(1),
    **dict.fromkeys((_ATEN.zeros_like.default, _ATEN.empty_like.default), _zeros_like),
    **dict.fromkeys((_ATEN.new_zeros.default, _ATEN.new_empty.default), _new_zeros),
    _ATEN.where.self: _where,
    _ATEN.exp.default: _exp,
    _ATEN.polar.default: _polar,
    **dict.fromkeys((_ATEN.to.dtype, torch.ops.aten._to_copy.default), _cast),
}
"""Operator → what it computes of complex numbers; ``NotImplemented`` where torch's exporter knows, or nobody does."""

DECOMPOSED = {op: written for op, written in OF_COMPLEX.items() if not is_composed(op)}
"""Operators of a program with complex numbers that torch decomposes so; it decomposes the others of itself."""
