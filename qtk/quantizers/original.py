"""What a layer held before a layer-wise method changed its weight or bias, in host memory or in temporary files."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtk.core.encoding import Encoding
from qtk.errors import CalibrationError

KEY = "tensor"


class KeptTensor:
    """A copy of a tensor that does not change, in host memory or in a temporary file; copies of it share it.

    The file is deleted with the last of them. A pickle holds the tensor itself.

    Args:
        tensor: is copied.
        on_disk: whether to write it to a file.

    Raises: CalibrationError if the file cannot be written.

    >>> import torch
    >>> x = torch.ones(2)
    >>> kept = KeptTensor(x)
    >>> _ = x.zero_()
    >>> kept.load()
    tensor([1., 1.])
    """

    def __init__(self, tensor: Tensor, *, on_disk: bool = False) -> None:
        copy = tensor.detach().to("cpu", copy=True)
        self._tensor: Tensor | None = None if on_disk else copy
        self._path: str | None = None
        if on_disk:
            try:
                descriptor, self._path = tempfile.mkstemp(prefix="qtk-", suffix=".safetensors")
                os.close(descriptor)
                weakref.finalize(self, _delete, self._path, os.getpid())
                save_file({KEY: copy.contiguous()}, self._path)
            except (OSError, SafetensorError) as error:
                raise CalibrationError(f"cannot keep a weight in {tempfile.gettempdir()}: {error}; set TMPDIR to "
                                       "another directory, or options=LayerwiseOptions(offload='cpu')") from error

    @property
    def is_there(self) -> bool:
        """Says whether ``load`` can return it: nobody has deleted its file."""
        return self._path is None or os.path.exists(self._path)

    def load(self) -> Tensor:
        """The tensor, on the CPU; to be read only. Raises: CalibrationError if its file is gone or damaged."""
        if self._tensor is not None:
            return self._tensor
        assert self._path is not None
        try:
            return load_file(self._path)[KEY]
        except (OSError, SafetensorError) as error:
            raise CalibrationError(f"cannot read a kept weight from {self._path}: {error}") from error

    def __deepcopy__(self, memo: object) -> KeptTensor:
        return self

    def __reduce__(self) -> tuple[type[KeptTensor], tuple[Tensor]]:
        return KeptTensor, (self.load(),)


def _delete(path: str, owner: int) -> None:
    if os.getpid() == owner:  # not a process that was forked from it
        with contextlib.suppress(OSError):
            os.unlink(path)


@dataclass(frozen=True, slots=True, eq=False)
class Original:
    """A layer before the first layer-wise method that rounded it, and how to tell whether it was changed since.

    Args:
        weight: the float weight; ``None`` if no method has written it.
        bias: the float bias; ``None`` if no method has written it.
        encoding: of the weight; ``None`` if there was none.
        frozen: whether the encoding was frozen.
        digest: of the weight and bias that the last method left.
        encoding_left: the encoding that the last method left.
    """

    weight: KeptTensor | None
    bias: KeptTensor | None
    encoding: Encoding | None
    frozen: bool
    digest: str
    encoding_left: Encoding | None

    @property
    def is_there(self) -> bool:
        """Says whether its tensors can be loaded."""
        return all(kept is None or kept.is_there for kept in (self.weight, self.bias))
