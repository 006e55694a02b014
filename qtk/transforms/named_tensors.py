"""The parameters and buffers of a model by name, whatever modules hold them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class NamedTensors:
    """The parameters and buffers of a model as they are at construction.

    A tensor that is held in several places (tied, or of a module that is called in several graphs) has one name, its
    first. Tensors are replaced, never written to: another model may hold the same ones.

    Args:
        model: a prepared model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: dict[int, str] = {}
        self._tensors: dict[str, Tensor] = {}
        self._places: dict[str, list[tuple[dict[str, Tensor | None], str]]] = {}
        for path, module in model.named_modules():
            for table in (module._parameters, module._buffers):
                for leaf, tensor in table.items():
                    if tensor is not None:
                        name = self._names.setdefault(id(tensor), f"{path}.{leaf}" if path else leaf)
                        self._tensors[name] = tensor
                        self._places.setdefault(name, []).append((table, leaf))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def name(self, tensor: Tensor) -> str | None:
        """The name of a parameter or buffer; ``None`` if the model does not hold the tensor."""
        return self._names.get(id(tensor))

    def tensor(self, name: str) -> Tensor:
        """The parameter or buffer called ``name``."""
        return self._tensors[name]

    def tensors(self) -> dict[str, Tensor]:
        """Name → tensor."""
        return dict(self._tensors)

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts new tensors in the places of the tensors with the same names. Changes the model."""
        for name, tensor in tensors.items():
            old = self._tensors[name]
            new = nn.Parameter(tensor, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else tensor
            for table, leaf in self._places[name]:
                table[leaf] = new
            self._tensors[name] = new
            self._names[id(new)] = name

    def remove(self, name: str) -> None:
        """Removes a parameter or buffer. Changes the model."""
        del self._tensors[name]
        for table, leaf in self._places.pop(name):
            del table[leaf]
