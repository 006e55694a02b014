"""The parameters that absorb the factors of channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtk.channels.channel_classes import ChannelClasses


@dataclass(frozen=True, slots=True, eq=False)
class ParameterOperand:
    """A parameter that an op reads, directly or through data movement.

    Args:
        name: of the parameter.
        shape: of what the op reads.
        positions: float64, of that shape: the flat position in the parameter of each element; ``None``: as it is.
    """

    name: str
    shape: torch.Size
    positions: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class WeightUse:
    """A use of a parameter that absorbs factors on both sides: its elements become w · r[output] / r[input].

    Args:
        parameter: its name.
        output_index: int64, broadcastable to the parameter: the output channel of each element, −1 if it has none.
        input_index: likewise; ``None`` if no input is multiplied with it.
        outputs: [out] the variable of each output channel.
        inputs: [in] the variable of each input channel; ``None`` as ``input_index``.
    """

    parameter: str
    output_index: Tensor
    input_index: Tensor | None
    outputs: Tensor
    inputs: Tensor | None

    def factor(self, factors: Tensor) -> Tensor:
        """The factor of each element, broadcastable to the parameter, for the factor of each variable."""
        result = _pick(factors[self.outputs.long()], self.output_index)
        if self.inputs is not None and self.input_index is not None:
            divisor = factors[self.inputs.long()]
            if bool((divisor != 1).any()):
                result = result / _pick(divisor, self.input_index)
        return result


def _pick(factors: Tensor, index: Tensor) -> Tensor:
    if bool((factors == 1).all()):
        return factors.new_ones([1] * index.ndim)
    return torch.cat([factors, factors.new_ones(1)])[index]


class Absorbers:
    """Every parameter of a model, with the variables that stand for its factors.

    A parameter that is added, or that scales a norm, has one variable per element (``elements``); a weight absorbs on
    both sides (``use_weight``). One that is used in ways that contradict each other is pinned.
    """

    def __init__(self, model: nn.Module, classes: ChannelClasses) -> None:
        self._classes = classes
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.uses: dict[str, list[WeightUse]] = {}
        self.bases: dict[str, Tensor] = {}
        self._pinned: set[str] = set()

    def name(self, tensor: object) -> str | None:
        """The name of a floating-point parameter; ``None`` for any other tensor."""
        return self._names.get(id(tensor)) if isinstance(tensor, Tensor) and tensor.is_floating_point() else None

    def elements(self, operand: ParameterOperand) -> Tensor:
        """Labels of a parameter as a value, with one variable per element."""
        shape = self.shapes[operand.name]
        if operand.name not in self.bases:
            self.bases[operand.name] = self._classes.new(shape.numel()).view(shape)
        base = self.bases[operand.name]
        return base if operand.positions is None else base.flatten()[operand.positions.long()]

    def use_weight(
        self,
        operand: ParameterOperand,
        output_index: Tensor,
        num_outputs: int,
        input_index: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> WeightUse:
        """Records a use as a weight. The same use for the second time has the same variables.

        Args:
            operand: the weight.
            output_index: the output channel of each element, broadcastable to the operand.
            num_outputs: how many output channels there are.
            input_index: the input channel, likewise.
            inputs: [in] labels of the input channels.
        """
        output_index = self._at_parameter(operand, output_index)
        input_index = None if input_index is None else self._at_parameter(operand, input_index)
        known = self.uses.setdefault(operand.name, [])
        for use in known:
            if _same(use.output_index, output_index) and _same(use.input_index, input_index):
                if use.inputs is not None and inputs is not None:
                    merged = self._classes.unify(use.inputs, inputs)
                    known[known.index(use)] = use = WeightUse(
                        use.parameter, use.output_index, use.input_index, use.outputs, merged
                    )
                return use
        if any(bool(((use.output_index >= 0) & (output_index >= 0)).any()) for use in known):
            self.pin(operand.name)
        if operand.positions is not None and operand.positions.unique().numel() != operand.shape.numel():  # type: ignore[no-untyped-call]
            self.pin(operand.name)  # one element serves in several places
        known.append(WeightUse(operand.name, output_index, input_index, self._classes.new(num_outputs), inputs))
        return known[-1]

    def pin(self, name: str) -> None:
        """The parameter must stay as it is."""
        self._pinned.add(name)

    def pin_tensor(self, tensor: object) -> None:
        """As ``pin``, if ``tensor`` is a floating-point parameter."""
        name = self.name(tensor)
        if name is not None:
            self.pin(name)

    def close(self) -> None:
        """Pins the variables of all parameters that must stay as they are."""
        for name in self._pinned | (self.uses.keys() & self.bases.keys()):
            if name in self.bases:
                self._classes.pin(self.bases[name])
            for use in self.uses.get(name, ()):
                self._classes.pin(use.outputs)
                if use.inputs is not None:
                    self._classes.pin(use.inputs)

    def factors(self, by_variable: Tensor) -> dict[str, Tensor]:
        """Name → factor, broadcastable to the parameter, of every parameter that changes."""
        changed = {name: by_variable[base.long()] for name, base in self.bases.items()}
        for name, uses in self.uses.items():
            for use in uses:
                factor = use.factor(by_variable)
                changed[name] = changed[name] * factor if name in changed else factor
        return {name: factor for name, factor in changed.items() if bool((factor != 1).any())}

    def _at_parameter(self, operand: ParameterOperand, index: Tensor) -> Tensor:
        """A channel index of the operand's elements as one of the parameter's, −1 for elements the op does not read."""
        if operand.positions is None:
            return index
        shape = self.shapes[operand.name]
        full = torch.full((shape.numel(),), -1)
        full[operand.positions.long().flatten()] = index.expand(operand.shape).flatten()
        return full.view(shape)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(*torch.broadcast_tensors(a, b))  # type: ignore[no-untyped-call]
