"""Forward-mode differentiation, which the straight-through estimator of fake-quantization is not made for."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


def refuse_forward_mode(op: str, *tensors: Tensor | None) -> None:
    """Without it, ``torch.library`` would take the results of an op for constants, and give derivatives of 0.

    Raises: NotImplementedError, as an op of torch without them, if a derivative in forward mode is asked for.

    >>> import torch
    >>> x = torch.ones(2)
    >>> torch.func.jvp(lambda x: refuse_forward_mode("qtk::op", x), (x,), (x,))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    NotImplementedError: qtk::op has no derivatives in forward mode (torch.func.jvp, jacfwd, hessian); use reverse ...
    """
    if any(tensor is not None and unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
           for tensor in tensors):
        raise NotImplementedError(
            f"{op} has no derivatives in forward mode (torch.func.jvp, jacfwd, hessian); use reverse mode: "
            "torch.func.vjp, jacrev, torch.autograd.functional.hessian"
        )
