"""Runs ``.aimodel`` files by coreai-core: by macOS 27's Core AI there, elsewhere by the package's own CPU code."""

from __future__ import annotations

import asyncio
import platform
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtk.errors import ExportError, first_line
from qtk.export.coreai.library import ENTRY, load
from qtk.report.runtime_nodes import RuntimeNodes

NARROWED = {torch.int64: torch.int32, torch.float64: torch.float32}
"""Core AI has no numbers of 64 bits."""

SETTLING_SECONDS = 0.1
"""Core AI's threads let go of Python's objects a little later, and end the process with SIGABRT if it is over by then
(coreai-core 1.0.0b3 on Linux: 5 of 6 processes, with this pause none of 40)."""


class CoreAiFile:
    """An ``.aimodel`` directory, loaded.

    Args:
        file: the directory.
        reasons: not used: Core AI does not say what it computes in integers.
        threads: not used: Core AI takes none.

    Raises: ExportError if coreai-core is not installed, or does not load the file.
    """

    sites: Sequence[str] = ()

    def __init__(self, file: Path, reasons: Mapping[str, str], *, threads: int = 0) -> None:
        where = "of macOS" if platform.system() == "Darwin" else "CPU code of the package, not of an Apple device"
        asset = load(file)
        self.runtime = f"Core AI {version('coreai-core')}, {where}"
        self._asked, self._told = SimpleQueue[Any](), SimpleQueue[Any]()
        thread = threading.Thread(target=_serve, args=(asset, self._asked, self._told), daemon=True)
        thread.start()
        loaded = self._told.get()
        if isinstance(loaded, Exception):
            raise ExportError(f"{file}: {self.runtime} does not load it: {first_line(loaded)}; files of qtk are for "
                              "macOS 27 and iOS 27 or later; coreai-core's wheel runs them elsewhere") from loaded
        self.inputs, self.outputs = loaded
        weakref.finalize(self, _stop, self._asked, thread)

    def run(self, inputs: Mapping[str, Tensor], *, sites: bool = False) -> dict[str, Tensor]:
        """The outputs by name, with a first axis of one call. Raises: what the runtime raises."""
        return {name: torch.from_numpy(value)[None] for name, value in self._call(_arrays(inputs)).items()}

    def timed(self, inputs: Mapping[str, Tensor]) -> Callable[[], object]:
        arrays = _arrays(inputs)
        return lambda: self._call(arrays)

    def nodes(self) -> RuntimeNodes | None:
        """``None``: Core AI does not say what it executes."""
        return None

    def _call(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        self._asked.put(arrays)
        returned: dict[str, np.ndarray[Any, Any]] | Exception = self._told.get()
        if isinstance(returned, Exception):
            raise returned
        return returned


def _arrays(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    values = {name: value.detach().cpu() for name, value in inputs.items()}
    return {name: np.ascontiguousarray(value.to(NARROWED.get(value.dtype, value.dtype)).numpy())
            for name, value in values.items()}


def _serve(asset: Any, asked: SimpleQueue[Any], told: SimpleQueue[Any]) -> None:
    """Answers calls in a thread of its own: Core AI's calls are coroutines, and notebooks have a loop of their own."""
    from coreai.runtime import NDArray

    async def answer() -> None:
        async with asset.executable() as model:
            function = model.load_function(ENTRY)
            told.put(([*function.desc.input_names], [*function.desc.output_names]))
            while (arrays := asked.get()) is not None:
                try:
                    returned = await function({name: NDArray(value) for name, value in arrays.items()})
                    told.put({name: np.array(value.numpy()) for name, value in returned.items()})
                    del returned
                except Exception as error:  # whatever the runtime says
                    told.put(error)
            del function, model

    try:
        asyncio.run(answer())
    except Exception as error:
        told.put(error)


def _stop(asked: SimpleQueue[Any], thread: threading.Thread) -> None:
    asked.put(None)
    thread.join()
    time.sleep(SETTLING_SECONDS)
