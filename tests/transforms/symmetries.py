"""Counts the ways to multiply single parameters of a model by positive factors without changing its function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacfwd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree


def count_symmetries(model: nn.Module, args: tuple[Any, ...]) -> int:
    """The dimension of the space of t with f(θ · exp(ε t)) = f(θ) + O(ε²) for all inputs and all parameters θ.

    Found without a look at the graph: it is the kernel of J · diag(θ), J the Jacobian of the outputs for a batch of
    inputs; that several random θ have in common. (At a single θ, a linear chain has other symmetries.)
    """
    named = dict(model.named_parameters())
    buffers = {name: _wide(buffer) for name, buffer in model.named_buffers()}
    generator = torch.Generator().manual_seed(5)
    gram: Tensor | float = 0.0
    for _ in range(4):
        drawn = [torch.randn(value.shape, generator=generator, dtype=torch.float64) for value in named.values()]
        values = [0.6 * (value + 0.5 * value.sign()) for value in drawn]

        def outputs(log_factors: tuple[Tensor, ...], values: list[Tensor] = values) -> Tensor:
            scaled = [value * torch.exp(log) for value, log in zip(values, log_factors, strict=True)]
            result = functional_call(model, {**dict(zip(named, scaled, strict=True)), **buffers}, args)
            return torch.cat([leaf.flatten() for leaf in pytree.tree_leaves(result) if leaf.is_floating_point()])

        with sdpa_kernel(SDPBackend.MATH):
            columns = jacfwd(outputs)(tuple(torch.zeros_like(value) for value in values))
        jacobian = torch.cat([column.flatten(1) for column in columns], 1)
        gram = gram + jacobian.mT @ jacobian / jacobian.square().sum()
    eigenvalues = torch.linalg.eigvalsh(gram)
    return int((eigenvalues < 1e-13).sum())


def _wide(buffer: Tensor) -> Tensor:
    return buffer.double() if buffer.is_floating_point() else buffer
