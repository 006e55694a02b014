"""Batch norm that takes its parameters as arguments, so that they stay edges of the graph."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtk.errors import CaptureError
from qtk.nn.eval_mode import FROZEN, keep_frozen
from qtk.torch_private import HOOK_TABLES, BatchNormBase, hooks


class BatchNorm(nn.Module):
    """The settings of a batch norm that no module of torch's calls, such as ``F.batch_norm`` in a model's own code.

    Args:
        momentum: weight of the newest batch in the running statistics; ``None``: their cumulative average.
        eps: added to the variance.
        always_batch_statistics: normalise by the batch in eval mode too.
    """

    track_running_stats = True

    def __init__(self, momentum: float | None, eps: float, *, always_batch_statistics: bool = False) -> None:
        super().__init__()
        self.momentum = momentum
        self.eps = eps
        self.always_batch_statistics = always_batch_statistics

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}, eps={self.eps}"


def freeze_batch_norms(model: nn.Module, frozen: bool) -> None:
    """Sets whether the batch norms of ``model`` stay in eval mode; they change to it now, and not back. In place."""
    for module in model.modules():
        if isinstance(module, (BatchNorm, BatchNormBase)):
            vars(module)[FROZEN] = frozen
    keep_frozen(model)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    module: nn.Module,
) -> Tensor:
    """The batch norm with the present settings (mode, momentum, eps) of ``module``; updates statistics in place.

    ``module`` is torch's own, whose own count of batches is used, or ``BatchNorm``. What a freezing helper puts in the
    place of one (weights and statistics are buffers) normalises by its statistics in both modes.

    >>> norm = nn.BatchNorm1d(2).eval()
    >>> x = torch.randn(3, 2)
    >>> torch.equal(batch_norm(x, norm.weight, norm.bias, norm.running_mean, norm.running_var, None, norm), norm(x))
    True

    Shape: ``x`` [N, C, …]; the others [C], ``num_batches_tracked`` []; result as ``x``.

    Raises: CaptureError if ``module`` is of another kind.
    """
    if not isinstance(module, (BatchNormBase, BatchNorm)):
        _check_frozen(module)
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, float(module.eps))  # type: ignore[arg-type]
    training, calls_hooks = module.training, len(hooks(module)) > 0
    if calls_hooks and not _only_normalises(module):
        _warn_of_hooks(module)
        calls_hooks = False
    if calls_hooks or (training and isinstance(module, nn.SyncBatchNorm)):
        tensors = {name: value for name, value in (("weight", weight), ("bias", bias)) if value is not None}
        result: Tensor = torch.func.functional_call(module, tensors, (x,))
        return result
    if isinstance(module, BatchNorm):
        by_batch = training or module.always_batch_statistics
    else:
        by_batch = training or (running_mean is None and running_var is None)
        num_batches_tracked = module.num_batches_tracked
    momentum = 0.0 if module.momentum is None else module.momentum
    if training and module.track_running_stats and num_batches_tracked is not None:
        num_batches_tracked.add_(1)
        if module.momentum is None:
            momentum = 1.0 / float(num_batches_tracked)
    if training and not module.track_running_stats:
        running_mean = running_var = None
    return F.batch_norm(x, running_mean, running_var, weight, bias, by_batch, momentum, module.eps)


def _only_normalises(module: nn.Module) -> bool:
    """Says whether the forward of ``module`` is torch's own; a subclass's may do more, which is in the graph."""
    return type(module).forward in (BatchNormBase.forward, nn.SyncBatchNorm.forward)


def _warn_of_hooks(module: nn.Module) -> None:
    """Warns that hooks of ``module``, but for our own, are not called: in the graph its forward is single ops."""
    hooks = [getattr(hook, "__qualname__", type(hook).__qualname__)
             for table in HOOK_TABLES for hook in getattr(module, table).values()
             if not str(getattr(hook, "__module__", "")).startswith("qtk.")]
    if not hooks:
        return
    warnings.warn(
        f"hooks of a {type(module).__name__} that will not be called: {', '.join(hooks)}; its forward is its own, and "
        "the prepared model runs the ops in it; put them on a module around it of qtk.block_view(sim, …), which is "
        "called", stacklevel=2,
    )


def _check_frozen(module: nn.Module) -> None:
    buffers = dict(module.named_buffers(recurse=False))
    if not {"weight", "bias", "running_mean", "running_var"} <= buffers.keys() or not hasattr(module, "eps"):
        raise CaptureError(
            f"a {type(module).__name__} stands in the place of a batch norm, whose part in the graph it cannot take; "
            "put a batch norm of torch's or a frozen one there, or change the original model and prepare that again"
        )
