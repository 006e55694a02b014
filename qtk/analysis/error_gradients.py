"""Products of gradients with quantization errors, of every site, in one forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qtk.errors import CalibrationError
from qtk.graph.graphs import entered
from qtk.nn.eval_mode import not_trained
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.torch_private import pytree

Alternatives = dict[Quantizer, Tensor]
"""For each quantizer, what a value would be if this quantizer alone were switched."""


class ErrorGradients(TorchFunctionMode):
    """``Σ g·e`` of each quantizer, per sample: ``g`` the gradient of what runs backward, ``e`` the error.

    The model runs in float, and the error is ``quantized - float``: what changes when this quantizer alone acts. The
    error of an activation is taken where it is made. Gradients of a weight add up over samples, so the error of a
    weight is taken at the output of the op that reads it, which is
    ``op(x, w + e) - op(x, w)``: there every sample has its own, and no gradient of a weight is computed.

    Samples are told apart where a value and the outputs have a first axis of one length, and no output depends on
    another sample's values; elsewhere (windows, time first) the batch counts as one sample, which leaves expectations
    as they are, with more variance.

    Args:
        quantizers: the quantizers to observe, which are bypassed meanwhile.
        rounded: the quantizers of weights that layer-wise methods have rewritten → what they quantize when they act.
    """

    def __init__(
        self, quantizers: Iterable[Quantizer], rounded: Mapping[Quantizer, Tensor] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self._quantizers = list(quantizers)
        self._rounded = rounded
        self._paused = self._keeps_errors = False
        self._tracked: dict[int, tuple[Tensor, Alternatives]] = {}
        self._leaves: list[Tensor] = []
        self.samples: int | None = None
        self._probed: int | None = None
        self._mixes: bool | None = None  # not known before the first batch
        self.seen: set[Quantizer] = set()
        self.lost: set[Quantizer] = set()
        self._products: dict[Quantizer, tuple[Tensor | float, Tensor | float]] | None = None

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        """Runs the body with gradients, of values alone, and remembers the errors of what ``model`` computes."""
        self._tracked, self._leaves = {}, []
        handles = [quantizer.register_forward_hook(self._quantized) for quantizer in self._quantizers]
        handles += [
            module.register_forward_pre_hook(_called_with_gradients, with_kwargs=True) for module in entered(model)
        ]
        try:
            with not_trained(model), torch.enable_grad(), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def products(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, *, keep: bool = False
    ) -> dict[Quantizer, tuple[Tensor | float, Tensor | float]]:
        """For each quantizer ``Σ g·e``: of each sample, and of the batch where samples are not told apart.

        ``gradients``: of ``outputs``; ``None`` for a scalar. ``keep``: more is run backward afterwards.
        """
        self._products, self._keeps_errors = {}, keep
        try:
            given = None if gradients is None else list(gradients)
            torch.autograd.backward(list(outputs), given, retain_graph=keep, inputs=self._leaves)
            return self._products
        finally:
            self._products = None
            if not keep:
                self._tracked, self._leaves = {}, []

    def count_samples(self, outputs: Sequence[Tensor]) -> None:
        """Takes the number of samples from the outputs, all of which must begin with it, and depend on no other sample.

        That is seen on the first batch: the gradients of the first and the last sample's outputs must be 0 elsewhere.
        """
        lengths = {output.shape[0] for output in outputs}
        self.samples = lengths.pop() if len(lengths) == 1 else None
        if self.samples is not None and self._mixes is None and self.samples > 1:
            self._mixes = False
            for probed in (0, self.samples - 1):
                self._probed = probed
                chosen = [torch.zeros_like(output) for output in outputs]
                for each in chosen:
                    each[probed] = 1
                torch.autograd.backward(list(outputs), chosen, retain_graph=True, inputs=self._leaves)
            self._probed = None
        if self._mixes:
            self.samples = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        output = func(*args, **keywords)
        if self._paused or not self._tracked or not isinstance(output, Tensor | tuple | list):
            return output
        tensors = [each for each in _flat([*args, *keywords.values()]) if isinstance(each, Tensor)]
        tracked = [self._tracked[id(each)][1] for each in tensors if id(each) in self._tracked]
        if not tracked:
            return output
        switched = dict.fromkeys(quantizer for alternatives in tracked for quantizer in alternatives)
        of_parameters = all(id(each) in self._tracked or isinstance(each, nn.Parameter) for each in tensors)

        def again(quantizer: Quantizer) -> Any:
            def other(value: Any) -> Any:
                if isinstance(value, list | tuple):
                    return type(value)(map(other, value))
                alternatives = self._tracked_or_nothing(value)
                return alternatives.get(quantizer, value)

            with torch.no_grad():
                return func(*map(other, args), **{key: other(value) for key, value in keywords.items()})

        if isinstance(output, Tensor):
            return self._watched(output, switched, again, of_parameters)
        return type(output)(
            self._watched(each, switched, partial(_element, again, index), of_parameters)
            if isinstance(each, Tensor) else each for index, each in enumerate(output)
        )

    def _watched(
        self, output: Tensor, switched: Mapping[Quantizer, None], again: Callable[[Quantizer], Tensor],
        of_parameters: bool,
    ) -> Tensor:
        """Remembers what an op returned that has read values with alternatives, or watches it for its gradient."""
        if not output.is_floating_point():
            return output
        if of_parameters:
            self._tracked[id(output)] = output, {quantizer: again(quantizer) for quantizer in switched}
            return output
        value = self._with_gradient(output)
        for quantizer in switched:
            self._watch(value, quantizer, lambda quantizer=quantizer: again(quantizer))  # type: ignore[misc]
        return value

    def _quantized(self, quantizer: Quantizer, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The output of a quantizer, tracked if it is one of parameters, else watched."""
        self.seen.add(quantizer)
        if not torch.is_grad_enabled():
            return output
        self._paused = True
        try:
            (x,) = inputs
            alternatives = dict(self._tracked_or_nothing(x))
            if quantizer.static and not x.requires_grad:
                output = output.detach()
                self._tracked[id(output)] = output, {**alternatives, quantizer: self._simulate(quantizer, x)}
                return output
            value = output.view_as(output) if output.requires_grad else self._with_gradient(output)
            for other, alternative in alternatives.items():
                self._watch(value, other, lambda alternative=alternative: alternative)  # type: ignore[misc]
            x = x.detach()
            version = x._version

            def simulated() -> Tensor | None:
                return self._simulate(quantizer, x) if x._version == version else None

            self._watch(value, quantizer, simulated, per_sample_axis=not quantizer.static)
            return value
        finally:
            self._paused = False

    def _with_gradient(self, value: Tensor) -> Tensor:
        if value.requires_grad:
            return value
        leaf = value.detach().requires_grad_()
        self._leaves.append(leaf)
        return leaf

    def _watch(
        self, value: Tensor, quantizer: Quantizer, alternative: Callable[[], Tensor | None], *,
        per_sample_axis: bool = True,
    ) -> None:
        """Multiplies the gradient of ``value``, once it is known, with what it would change by.

        A value that the model has overwritten since has lost that: nothing is known of its quantizer.
        """
        held = value.detach()
        version = held._version
        errors: list[Tensor] = []  # computed when the gradient is known, so that not all are held at a time

        def multiply(gradient: Tensor) -> None:
            if self._probed is not None:
                if per_sample_axis and gradient.ndim and gradient.shape[0] == self.samples:
                    others = [index for index in range(gradient.shape[0]) if index != self._probed]
                    self._mixes = self._mixes or bool(gradient[others].count_nonzero())
                return
            if self._products is None:
                return
            with torch.no_grad():
                switched = held if errors else alternative()
                if switched is None or held._version != version:
                    self.lost.add(quantizer)
                    return
                error = errors.pop() if errors else switched.float() - held.float()
                if self._keeps_errors:
                    errors.append(error)
                product = gradient.float() * error
                per_sample, batch = self._products.get(quantizer, (0.0, 0.0))
                if product.ndim and product.shape[0] == self.samples and per_sample_axis:
                    per_sample = per_sample + product.flatten(1).sum(1) if product.ndim > 1 else per_sample + product
                else:
                    batch = batch + product.sum()
                self._products[quantizer] = per_sample, batch

        value.register_hook(multiply)  # type: ignore[no-untyped-call]

    def _simulate(self, quantizer: Quantizer, x: Tensor) -> Tensor:
        with torch.no_grad(), in_mode([quantizer], Mode.SIMULATE):
            return quantizer.forward(self._rounded.get(quantizer, x))

    def _tracked_or_nothing(self, value: object) -> Alternatives:
        return self._tracked[id(value)][1] if id(value) in self._tracked else {}


def _called_with_gradients(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments without gradients of their own. Raises: CalibrationError if gradients are off."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise CalibrationError("forward turns gradients off (no_grad, inference_mode), by which sensitivity estimates; "
                               "run the model without that")
    detached: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
    return detached


def _element(again: Callable[[Quantizer], Any], index: int, quantizer: Quantizer) -> Any:
    return again(quantizer)[index]


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
