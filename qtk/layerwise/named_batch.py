"""Names the batch of a walk that an error comes from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qtk.calls.calls import Call, leaves_text
from qtk.errors import CalibrationError, QtkError
from qtk.graph.failed_op import failed_op
from qtk.public import PASS_THROUGH, raised_by_us


@contextmanager
def named_batch(batch: int, call: Call) -> Iterator[None]:
    """Names the batch in the errors of the body. Raises: CalibrationError in place of an error of the model."""
    try:
        yield
    except QtkError as error:
        raise type(error)(f"batch {batch}: {error}") from None
    except PASS_THROUGH:
        raise
    except Exception as error:  # whatever a model raises
        if raised_by_us(error):
            raise
        inputs, op = leaves_text((call.args, call.kwargs)), failed_op(error)
        where = f" at {op}" if op else ""
        message = f"batch {batch} ({inputs}) does not run{where}: {type(error).__name__}: {error}"
        raise CalibrationError(message) from error
