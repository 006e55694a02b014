"""Weighs the values that a calibration observes by what a change of them does to the products that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qtk.data.valid_tokens import ValidTokens
from qtk.errors import CalibrationError
from qtk.graph.graphs import entered
from qtk.nn.eval_mode import not_trained
from qtk.numerics.random_signs import random_signs
from qtk.observers.weighted_histogram import WeightedHistogram
from qtk.operators.lookup import is_product
from qtk.quantizers.quantizer import Quantizer
from qtk.torch_private import pytree

SEED = 0


class LocalGradients(TorchFunctionMode):
    """Gives the elements of observed values the weights ``Σₒ (∂yₒ/∂x)²``, y the outputs of the products that read x.

    The model runs with gradients, and then backward, where the gradient of each matrix product, each convolution and
    each output of the model is replaced by random signs: what arrives at a value is ``Σₒ ±∂yₒ/∂x`` over the products
    that come next, whose square has the sum above as its expectation.

    Args:
        observers: the observers that sum the weights.
        tokens: which rows of the values count.
    """

    def __init__(self, observers: Mapping[Quantizer, WeightedHistogram], tokens: ValidTokens) -> None:
        super().__init__()
        self.observers = {quantizer: _OfValidRows(each, quantizer, tokens) for quantizer, each in observers.items()}
        self._signs = torch.Generator().manual_seed(SEED)
        self._before: list[bool] = []

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        """While the body runs, every call of ``model`` is run backward too; without ``observers`` nothing changes."""
        if not self.observers:
            yield
            return
        handles = [quantizer.register_forward_hook(self._observed) for quantizer in self.observers]
        for module in entered(model):
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with not_trained(model), torch.inference_mode(False), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._before and isinstance(output, Tensor) and output.requires_grad and is_product(func):
            output.register_hook(self._signs_like)  # type: ignore[no-untyped-call]
        return output

    def _signs_like(self, gradient: Tensor) -> Tensor:
        return random_signs(gradient, self._signs)

    def _enter(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turns gradients on. Raises: CalibrationError in inference mode."""
        if torch.is_inference_mode_enabled():
            raise CalibrationError("activation_mse weighs errors by gradients, and forward turns them off for good "
                                   "(inference_mode); use no_grad there, or scheme='mse'")
        self._before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(True)
        inputs: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, _plain, (args, kwargs))
        return inputs

    def _leave(self, model: nn.Module, args: object, output: object) -> object:
        """Runs backward, and turns gradients off again. Raises: CalibrationError if the model has none."""
        if not self._before:  # the model was not entered
            return output
        torch.set_grad_enabled(self._before.pop())
        leaves = [each for each in pytree.tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
        if leaves:
            try:
                torch.autograd.backward(leaves, [random_signs(each, self._signs) for each in leaves])
            except (RuntimeError, NotImplementedError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise CalibrationError("activation_mse weighs errors by gradients, and the model has none: "
                                       f"{error}; use scheme='mse'") from error
        return pytree.tree_map_only(Tensor, Tensor.detach, output)

    def _observed(self, quantizer: Quantizer, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not output.is_floating_point():
            return output
        value = output if output.requires_grad else output.detach().requires_grad_()
        held, weigh = output.detach(), self.observers[quantizer].weigher()
        version = held._version

        def weigh_by(gradient: Tensor) -> None:
            if held._version == version:  # else the model has overwritten it
                weigh(held, gradient)

        value.register_hook(weigh_by)  # type: ignore[no-untyped-call]
        return value


class _OfValidRows:
    """What a quantizer calls in place of an observer: it sees the valid rows alone."""

    def __init__(self, observer: WeightedHistogram, quantizer: Quantizer, tokens: ValidTokens) -> None:
        self._observer, self._quantizer, self._tokens = observer, quantizer, tokens
        self._rows: Callable[[Tensor], Tensor] = lambda value: value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observer, name)

    def observe(self, x: Tensor) -> None:
        self._rows = self._tokens.selector(self._quantizer)
        self._observer.observe(self._rows(x))

    def weigher(self) -> Callable[[Tensor, Tensor], None]:
        """Takes the value that was observed last, and its gradient."""
        observer, rows = self._observer, self._rows

        def weigh(x: Tensor, gradient: Tensor) -> None:
            observer.weigh(rows(x), rows(gradient))

        return weigh


def _plain(x: Tensor) -> Tensor:
    """Without a gradient of its own; of a tensor made in inference mode, a copy that can have one."""
    return x.clone() if x.is_inference() else x.detach()
