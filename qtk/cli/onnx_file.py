"""An exported ONNX file as a module with the inputs of the model it was exported from."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, fx, nn

from qtk.calls.calls import Call
from qtk.errors import ExportError
from qtk.export.file_signature import file_inputs, file_signature
from qtk.graph.written_buffers import buffer_values
from qtk.runtimes.session import open_session
from qtk.torch_private import pytree


class OnnxFile(nn.Module):
    """Runs a file in ONNX Runtime on the CPU, with its optimizations where they are correct.

    ``runtime`` describes how the file runs. The buffers that the model's forward writes are buffers of this module.

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
        self.held = list(file_signature(model).buffers)
        for index, value in enumerate(buffer_values(model).values()):
            self.register_buffer(f"buffer_{index}", value.cpu())

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        """The outputs, flat. Raises: ExportError if the file does not run on these inputs."""
        buffers = list(self.buffers())
        call = Call(args, kwargs, None, buffers=dict(zip(self.held, buffers, strict=True)))
        tensors = file_inputs(self.signature[0], call)
        try:
            feed = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
            outputs = [torch.from_numpy(array) for array in self.session.run(None, feed)]
        except Exception as error:
            raise ExportError(f"{self.path}: ONNX Runtime: {type(error).__name__}: {error}") from error
        own = len(outputs) - len(buffers)
        for buffer, value in zip(buffers, outputs[own:], strict=True):
            buffer.copy_(value)
        return tuple(outputs[:own])


def nested_like(output: object, flat: object) -> object:
    """The flat outputs of a file, nested as the model's ``output``."""
    leaves, structure = pytree.tree_flatten(output)
    tensors = iter(pytree.tree_leaves(flat))
    return pytree.tree_unflatten([next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
