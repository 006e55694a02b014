"""An exported ONNX file as a module with the inputs of the model it was exported from."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, fx, nn

from qtk.capture.inputs import input_leaves
from qtk.capture.signature import input_names
from qtk.errors import ExportError
from qtk.export.onnx.session import open_session
from qtk.torch_private import pytree


class OnnxFile(nn.Module):
    """Runs a file in ONNX Runtime on the CPU, with its optimizations where they are correct.

    ``runtime`` describes how the file runs.

    Args:
        path: the file.
        model: the simulation it was exported from, whose signature defines the nesting of inputs.

    Raises: ExportError if onnxruntime is not installed or cannot load the file.
    """

    def __init__(self, path: Path, model: fx.GraphModule) -> None:
        super().__init__()
        self.path = path
        self.signature = [model]  # in a list, so that it is not registered as a submodule
        self.session, self.runtime = open_session(path, model)
        self.names = [value.name for value in self.session.get_inputs()]

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        """The outputs, flat. Raises: ExportError if the file does not run on these inputs."""
        model = self.signature[0]
        leaves = zip(input_names(model), input_leaves(model.graph, args, kwargs), strict=True)
        tensors = {name: leaf for name, leaf in leaves if isinstance(leaf, Tensor)}
        try:
            feed = {name: tensors[name].detach().cpu().numpy() for name in self.names}
            return tuple(torch.from_numpy(array) for array in self.session.run(None, feed))
        except Exception as error:
            raise ExportError(f"{self.path}: ONNX Runtime: {type(error).__name__}: {error}") from error


def nested_like(output: object, flat: object) -> object:
    """The flat outputs of a file, nested as the model's ``output``."""
    leaves, structure = pytree.tree_flatten(output)
    tensors = iter(pytree.tree_leaves(flat))
    return pytree.tree_unflatten([next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
