"""Which quantizers read the memory of a parameter."""

from __future__ import annotations

from torch import Tensor, nn

from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_called
from qtk.operators.targets import attribute
from qtk.quantizers.quantizer import Quantizer


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Returns what tensors have in common that share memory: tied ones and views.

    >>> import torch
    >>> whole = torch.zeros(4)
    >>> memory_of(whole[:2]) == memory_of(whole[2:])
    True
    """
    return tensor.device, tensor.untyped_storage().data_ptr()


def parameter_readers(model: nn.Module) -> dict[object, set[Quantizer | None]]:
    """Memory → the quantizers that read it in any graph; ``None`` among them for any other reader."""
    readers: dict[object, set[Quantizer | None]] = {}
    for graph in graphs(model).values():
        for node in graph.graph.nodes:
            if node.op == "get_attr" and isinstance(value := attribute(graph, str(node.target)), Tensor):
                of_memory = readers.setdefault(memory_of(value), set())
                of_memory |= {quantizer_called(user) for user in node.users}
    return readers
