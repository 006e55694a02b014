"""Records the calls of a model that data make, for layer-wise methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from qtk.calls.call_recording import Recorded, recording
from qtk.calls.calls import Call
from qtk.data.forward_pass import Data, Forward, run_all
from qtk.data.valid_tokens import Valid, ValidTokens
from qtk.errors import CalibrationError
from qtk.graph.graphs import roots, states_of
from qtk.graph.written_buffers import written_buffers
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer


def recorded_calls(
    model: nn.Module, quantizers: Sequence[Quantizer], data: Data, forward: Forward | None, num_batches: int | None,
    valid: Valid | None = None,
) -> list[Call]:
    """The calls of the model that the data make; each runs to its end only if user code, or the next, needs its output.

    Args:
        model: a prepared model with quantizers.
        quantizers: bypassed while the model runs.
        data: as for ``compute_encodings``.
        forward: how to run the model on a batch.
        num_batches: batches to take of the data.
        valid: which tokens count; the calls hold that.

    Raises: CalibrationError if there is no call, or ``valid`` gives no mask.
    """
    needs_outputs = forward is not None or not isinstance(data, Iterable) or bool(
        states_of(model) or any(written_buffers(graph.graph) for graph in roots(model).values()))
    tokens = ValidTokens(model, valid)
    with recording(model, run=needs_outputs, valid=tokens.masks) as calls, in_mode(quantizers, Mode.BYPASS):
        run_all(model, data, forward=tokens.forward(forward), num_batches=num_batches, label="reading",
                ended_by=() if needs_outputs else (Recorded,))
    if not calls:
        raise CalibrationError("the data never call the model; pass batches, or a function that runs it")
    if valid is not None and any(call.valid is None for call in calls):
        raise CalibrationError(tokens.without_batch)
    return calls
