"""A captured model: one ATen graph whose parameters are edges and keep their names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from qtk.graph.prepare_report import PrepareReport


class PreparedModel(fx.GraphModule):
    """What ``prepare_model`` returns: called, trained, moved and saved like the model it was made from.

    Parameters are the original's own objects. Tensors that the captured code creates (``torch.arange`` and the like)
    follow ``.to()``: their device always, their dtype if it is the floating dtype of the model.
    """

    @property
    def report(self) -> PrepareReport:
        report = self.meta["report"]
        assert isinstance(report, PrepareReport)
        return report

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PreparedModel:
        before = self._anchor()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # a model without parameters has nothing to tell where it lives: ask the function itself
        after = self._anchor() if before is not None else None
        if before is None:
            before, after = torch.empty(0), fn(torch.empty(0))
        assert after is not None
        if (before.device, before.dtype) != (after.device, after.dtype):
            self._retarget(before, after)
        return self

    def _anchor(self) -> Tensor | None:
        tensors = [*self.parameters(), *self.buffers()]
        return next((tensor for tensor in tensors if tensor.is_floating_point()), next(iter(tensors), None))

    def _retarget(self, before: Tensor, after: Tensor) -> None:
        """Rewrites device and dtype arguments baked into the graph."""
        changed = False
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            kwargs = dict(node.kwargs)
            if kwargs.get("device") is not None:
                kwargs["device"] = after.device
            if kwargs.get("dtype") == before.dtype and before.dtype.is_floating_point:
                kwargs["dtype"] = after.dtype
            if kwargs != node.kwargs:
                node.kwargs = kwargs
                changed = True
        if changed:
            self.recompile()
