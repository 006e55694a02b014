"""Errors of a batch say which it was."""

import pytest
import torch

from qtk.calls.calls import Call
from qtk.errors import CalibrationError
from qtk.layerwise.named_batch import named_batch

CALL = Call((torch.zeros(2, 3),), {}, None)


@pytest.mark.parametrize(("error", "message"), [
    (CalibrationError("too few"), "batch 7: too few"),
    (ValueError("odd"), r"batch 7 \(.*2.*3.*\) does not run: ValueError: odd"),
])
def test_an_error_names_its_batch(error, message):
    with pytest.raises(CalibrationError, match=message), named_batch(7, CALL):
        raise error


def test_an_interrupt_is_left_as_it_is():
    with pytest.raises(KeyboardInterrupt), named_batch(7, CALL):
        raise KeyboardInterrupt
