"""The class of a simulated model as transformers knows it: its config, its linear modules, its names in checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtk.capture.prepared_model import PreparedModel
from qtk.errors import ExportError, first_line


@dataclass(frozen=True, slots=True, eq=False)
class OriginalModel:
    """A model of transformers on the meta device, of the same class and config.

    Args:
        module: the model, without numbers.
        generation_config: of the user's model; ``None`` if it has none.
    """

    module: Any
    generation_config: object | None

    @classmethod
    def of(cls, model: nn.Module) -> OriginalModel | None:
        """``None`` if the model is not one of transformers.

        Raises: ExportError if it cannot be made of its config.
        """
        from transformers import PreTrainedModel

        kind = model.original_type if isinstance(model, PreparedModel) else None
        config = getattr(model, "config", None)
        if kind is None or not issubclass(kind, PreTrainedModel) or not hasattr(config, "to_dict"):
            return None
        try:
            with torch.device("meta"):
                module = kind(copy.deepcopy(config))
        except Exception as error:  # whatever a class of the user's raises
            raise ExportError(f"{kind.__name__} cannot be made of its config alone, so that the names of its "
                              f"checkpoints are not known: {first_line(error)}") from error
        return cls(module, getattr(model, "generation_config", None))

    def config(self) -> dict[str, object]:
        """The config as it is saved, with the class of the model in it."""
        return {**self.module.config.to_dict(), "architectures": [type(self.module).__name__]}

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by their names in checkpoints; stacks of experts are taken apart as ``save_pretrained`` does."""
        from transformers.core_model_loading import revert_weight_conversion

        found: dict[str, Tensor] = revert_weight_conversion(self.module, dict(tensors))
        return found

    def linear_modules(self) -> list[str]:
        """The paths of all ``nn.Linear``."""
        return [path for path, module in self.module.named_modules() if isinstance(module, nn.Linear)]
