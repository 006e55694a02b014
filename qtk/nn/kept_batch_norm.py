"""A layer and the batch norm behind it, which stays live while the weight is quantized as it will be folded.

With scale = γ / √(running variance + eps), per output channel, folding makes of them one layer with the weight
``weight · scale`` and the bias ``bias · scale + β - running mean · scale``. Its quantizers see these two while the
batch norm is live too (Jacob et al., arXiv:1712.05877, §3.2; Krishnamoorthi, arXiv:1806.08342, §3.2.2). In eval mode
the layer computes with them, and the batch norm returns its input: the folded layer, bit for bit. In train mode the
quantized weight is divided by the scale again, and the batch norm normalises by the batch statistics of the output of
the layer with this weight. The scale follows the running statistics, not the batch, so that codes do not change from
one batch to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qtk.nn.batch_norm import BatchNorm, batch_norm
from qtk.nn.recomputation_guard import refuse_recomputation
from qtk.torch_private import BatchNormBase, hooks


def folding_scale(weight: Tensor | None, running_var: Tensor, eps: float) -> Tensor:
    """γ / √(running variance + eps), in float32 at least.

    Shape: ``weight`` (γ) and ``running_var`` [C]; result the same.

    >>> folding_scale(torch.tensor([2.0]), torch.tensor([3.0]), 1.0)
    tensor([1.])
    """
    wide = torch.promote_types(running_var.dtype, torch.float32)
    inverse = torch.rsqrt(running_var.to(wide) + eps)
    return inverse if weight is None else weight.to(wide) * inverse


@torch.library.custom_op("qtk::snapshot", mutates_args=(), schema="(Tensor x) -> Tensor")
def snapshot(x: Tensor) -> Tensor:
    """A copy of ``x`` that compilers keep for the backward pass.

    They would compute what follows from ``x`` again then, though ``x`` has been updated since (seen in torch 2.15).

    >>> snapshot(torch.tensor([1.0]))
    tensor([1.])
    """
    refuse_recomputation("the statistics of a live batch norm have moved")
    return x.clone()


snapshot.register_fake(torch.empty_like)


def scale_now(weight: Tensor | None, running_var: Tensor, module: nn.Module) -> Tensor:
    """``folding_scale`` of the batch norm ``module``, which will update ``running_var`` if it trains.

    Raises: CaptureError in a second run that would find other statistics.
    """
    if not is_folded(module):
        if torch.compiler.is_compiling():
            running_var = snapshot(running_var)
        else:
            refuse_recomputation(f"the statistics of a live {type(module).__name__}({len(running_var)}) have moved")
    return folding_scale(weight, running_var, float(module.eps))  # type: ignore[arg-type]


def along_channels(values: Tensor, shape: tuple[int, ...], axis: int, groups: int = 1) -> Tensor:
    """One value per output channel of a layer, laid out so that it broadcasts to the weight.

    Shape: ``values`` [out]; result broadcastable to ``shape``, the shape of the weight, whose output channels are
        at ``axis``: 0, or 1 with ``groups`` groups of them along axis 0.

    >>> along_channels(torch.arange(4), (6, 2, 3), axis=1, groups=2).squeeze(-1).tolist()
    [[0, 1], [0, 1], [0, 1], [2, 3], [2, 3], [2, 3]]
    """
    kernel = (1,) * (len(shape) - 2)
    if axis == 0:
        return values.reshape(-1, 1, *kernel)
    if groups == 1:
        return values.reshape(1, -1, *kernel)
    per_group = values.reshape(groups, 1, shape[1])
    return per_group.expand(groups, shape[0] // groups, shape[1]).reshape(*shape[:2], *kernel)


def scaled_weight(weight: Tensor, scale: Tensor, axis: int, groups: int) -> Tensor:
    """The weight times the scale of each output channel, rounded to the dtype of the weight."""
    return (weight.to(scale.dtype) * along_channels(scale, tuple(weight.shape), axis, groups)).to(weight.dtype)


def shifted_bias(
    bias: Tensor | None, scale: Tensor, norm_bias: Tensor | None, running_mean: Tensor, dtype: torch.dtype
) -> Tensor:
    """The bias · scale + β - running mean · scale, in ``dtype``, the dtype of the weight. Shape: all [C]."""
    shift = -running_mean.to(scale.dtype) * scale
    if norm_bias is not None:
        shift = shift + norm_bias
    return (shift if bias is None else bias * scale + shift).to(dtype)


def is_folded(module: nn.Module) -> bool:
    """Says whether the layer in front of the batch norm ``module`` computes what both will be when folded.

    Not in train mode, nor while hooks wait for the batch norm to be called.
    """
    return not isinstance(module, (BatchNormBase, BatchNorm)) or not (module.training or hooks(module))


def folded_weight(
    weight: Tensor, norm_weight: Tensor | None, running_var: Tensor, module: nn.Module, axis: int, groups: int
) -> Tensor:
    """The weight that the layer will have; ``module`` is the batch norm, whose eps counts."""
    scale = scale_now(norm_weight, running_var, module)
    return scaled_weight(weight, scale, axis, groups)


def folded_bias(
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor,
    module: nn.Module,
) -> Tensor:
    """The bias that the layer will have; ``weight`` is its weight, whose dtype it gets."""
    scale = scale_now(norm_weight, running_var, module)
    return shifted_bias(bias, scale, norm_bias, running_mean, weight.dtype)


def weight_in_use(
    folded: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    running_var: Tensor,
    module: nn.Module,
    axis: int,
    groups: int,
) -> Tensor:
    """The weight that the layer multiplies with now: ``folded``, quantized, or that without the scale."""
    if is_folded(module):
        return folded
    return unscaled_weight(folded, weight, norm_weight, running_var, module, axis, groups)


def unscaled_weight(
    folded: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    running_var: Tensor,
    module: nn.Module,
    axis: int,
    groups: int,
) -> Tensor:
    """``folded``, quantized, divided by the scale.

    Where γ is 0 the folded weight is 0 whatever the weight, and nothing is lost by its rounding: there it is ``weight``
    itself, so that the statistics of the batch, and the gradient of γ, are as in the float model.
    """
    scale = along_channels(scale_now(norm_weight, running_var, module), tuple(weight.shape), axis, groups)
    result: Tensor = _Unscaled.apply(folded, scale, weight.detach())
    return result


class _Unscaled(torch.autograd.Function):
    """``folded / scale``, and ``weight`` where the scale is 0; keeps its result, which the layer keeps anyway.

    No gradient goes to the weight where it stands for itself: γ is 0 there, and with it every gradient.
    """

    @staticmethod
    def forward(ctx: Any, folded: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        inverse = _inverse(scale)
        result = torch.addcmul((folded * inverse).to(folded.dtype), weight, (inverse == 0).to(weight.dtype))
        ctx.save_for_backward(result, scale)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        result, scale = ctx.saved_tensors
        inverse = _inverse(scale)
        of_folded = (grad * inverse).to(grad.dtype)
        if not ctx.needs_input_grad[1]:
            return of_folded, None, None
        return of_folded, -(grad * result).to(scale.dtype).sum_to_size(scale.shape) * inverse, None


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where the scale is 0 or has no inverse."""
    is_zero = scale.abs() < torch.finfo(scale.dtype).tiny
    return torch.where(is_zero, 0.0, 1 / torch.where(is_zero, 1.0, scale))


def bias_in_use(folded: Tensor, bias: Tensor | None, module: nn.Module) -> Tensor | None:
    """The bias that the layer adds now: ``folded``, quantized, or its own."""
    return folded if is_folded(module) else bias


def own_bias(folded: Tensor, bias: Tensor | None, module: nn.Module) -> Tensor | None:
    """The bias of the layer itself."""
    return bias


def kept_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    module: nn.Module,
    axis: int = 1,
    rank: int | None = None,
) -> Tensor:
    """``batch_norm``, or ``x`` if the layer that made it has computed that already; the others as ``by_channels``."""
    if is_folded(module):
        return x

    def normalized(rows: Tensor) -> Tensor:
        return batch_norm(rows, weight, bias, running_mean, running_var, num_batches_tracked, module)

    return by_channels(normalized, x, axis, rank)


def by_channels(normalize: Callable[[Tensor], Tensor], x: Tensor, axis: int, rank: int | None) -> Tensor:
    """``normalize``, which takes channels at axis 1, applied to ``x``, which has them at ``axis``.

    Args:
        normalize: of a tensor of ``rank`` axes.
        x: the tensor.
        axis: of its channels.
        rank: of the tensors that a batch norm is called with; ``None``: ``x`` is one.

    >>> by_channels(lambda rows: rows * torch.tensor([1, 10]), torch.ones(1, 3, 2), axis=-1, rank=2).tolist()
    [[[1.0, 10.0], [1.0, 10.0], [1.0, 10.0]]]
    """
    if rank is None:
        return normalize(x)
    last = x.movedim(axis, -1)
    rows = normalize(last.reshape(-1, last.shape[-1], *[1] * (rank - 2)))
    return rows.reshape(last.shape).movedim(-1, axis)
