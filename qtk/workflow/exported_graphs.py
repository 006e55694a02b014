"""The graphs of a simulation that an export writes a file of, each with a call, and what is read back from a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import fx, nn

from qtk.calls.call_recording import record_calls
from qtk.calls.calls import Call, with_rows
from qtk.calls.inputs import ExampleInputs, split_inputs
from qtk.errors import EncodingError, ExportError
from qtk.export.file_signature import file_stem
from qtk.graph.graphs import roots
from qtk.nn.eval_mode import evaluating


def onnx_name(path: str) -> str:
    """File name of a captured graph: ``model.onnx``, or an island's module path, see ``file_stem``.

    >>> onnx_name("backbone.body"), onnx_name("conv/1")
    ('backbone.body.onnx', 'conv%2F1.onnx')
    """
    return f"{file_stem(path or 'model')}.onnx"


@contextlib.contextmanager
def read_back(path: Path) -> Iterator[None]:
    """Raises: ExportError naming the file, if what is read back from it differs or cannot be read."""
    try:
        yield
    except (EncodingError, ExportError) as error:
        raise ExportError(f"{path.name} read back differs from the simulation: {error}; nothing was written") from error


def graph_calls(model: nn.Module, example_inputs: ExampleInputs) -> dict[str, tuple[fx.GraphModule, Call]]:
    """Path → (graph, a call of it) for every graph that the model calls on its example inputs."""
    call, graphs = Call(*split_inputs(example_inputs), None), roots(model)
    if "" in graphs:
        return {"": (graphs[""], call)}
    with evaluating(model):
        calls = record_calls(model, [call], of=graphs.values())
    return {path: (graph, _example(graph, calls[graph])) for path, graph in graphs.items() if graph in calls}


def _example(graph: nn.Module, calls: Sequence[Call]) -> Call:
    """The largest of ``calls``, with rows added if it has none."""
    largest = max(calls, key=lambda call: call.numel)
    return largest if largest.numel else with_rows(graph, largest)
