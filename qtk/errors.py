"""The errors of qtk: one root, each also the builtin exception a caller would expect."""

import torch

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""Errors that say nothing of what was tried, so that trying another way must not hide them."""


class QtkError(Exception):
    """Root of all qtk errors."""


class ArgumentError(QtkError, TypeError, ValueError):
    """An argument has another type than its function takes, or is none of its choices."""


class InternalError(QtkError, RuntimeError):
    """A defect of qtk: its own code raised something else than a ``QtkError``, which is the cause of this one."""


class SpecError(QtkError, ValueError):
    """A quantization spec is malformed, or does not fit the tensor it was given for."""


class ConfigError(QtkError, ValueError):
    """A configuration file, recipe or named option is wrong; the message holds the path of the key."""


class CaptureError(QtkError, RuntimeError):
    """A model could not be captured, or does not run on its example inputs."""


class VerificationError(QtkError, RuntimeError):
    """A rewrite that must preserve the model's outputs changed them."""


class CalibrationError(QtkError, ValueError):
    """No valid encoding follows from the calibration data: NaN or infinite bounds, no data, a bad setting."""


class NotCalibratedError(QtkError, RuntimeError):
    """A quantizer was asked to simulate before it had an encoding."""


class CheckError(QtkError, RuntimeError):
    """The simulation differs from its plan; the message lists every finding."""


class EncodingError(QtkError, ValueError):
    """Encodings do not belong to this model or to this site."""


class ExportError(QtkError, RuntimeError):
    """A file could not be written or read back, or its outputs differ from the simulation's."""


class BuildError(QtkError, RuntimeError):
    """The C++ kernels could not be compiled."""


def first_line(error: BaseException) -> str:
    r"""An error in one line: its type and the first line of its message.

    >>> first_line(ValueError("bad shape\nat conv1"))
    'ValueError: bad shape'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
