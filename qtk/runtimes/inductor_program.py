"""Compiles exported programs by Inductor for x86, with torchao's patterns of integer layers, and runs them."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from qtk.capture.torch_export import silent_torch
from qtk.errors import ExportError, first_line
from qtk.report.runtime_nodes import FloatNode, RuntimeNodes
from qtk.runtimes.program_inputs import LoadedProgram, ProgramInputs

INTEGER = re.compile(r"torch\.ops\.onednn\.(qconv\w*|qlinear\w*)")
FLOAT = re.compile(r"(?:extern_kernels|torch\.ops\.mkldnn|torch\.ops\.mkl)\."
                   r"(addmm|bmm|mm|convolution|_convolution\w*|_linear\w*|_mkl_linear)")


class InductorProgram(LoadedProgram):
    """A ``.pt2`` file, compiled when it first runs.

    Args:
        file: the file.
        reasons: name of a site that is not quantized → why.
        threads: threads of a run; 0: as many as torch has when the file is loaded.

    Raises: ExportError if torchao is not installed, or the file is no program.
    """

    sites: Sequence[str] = ()

    def __init__(self, file: Path, reasons: Mapping[str, str], *, threads: int = 0) -> None:
        try:
            importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")  # the patterns
        except ImportError as error:
            raise ExportError(f"running a program in Inductor needs the package {error.name}; "
                              "pip install 'qtk[torchao]'") from error
        self.runtime = f"Inductor of torch {torch.__version__}"
        self._program, self._threads = ProgramInputs(file), threads or torch.get_num_threads()
        self._functions: dict[str, Callable[..., Any]] = {}
        self._code: str | None = None  # of the last sizes that were compiled

    def run(self, inputs: Mapping[str, Tensor], *, sites: bool = False) -> dict[str, Tensor]:
        return self._program.by_name(self.timed(inputs)())

    def timed(self, inputs: Mapping[str, Tensor]) -> Callable[[], object]:
        args, kwargs = self._program.call(inputs)
        shapes = str([tuple(value.shape) for value in inputs.values()])
        if shapes not in self._functions:  # another call would be compiled anew without the patterns
            self._functions[shapes] = self._compiled(args, kwargs)
        function = self._functions[shapes]

        def run() -> object:
            with self._as_compiled():
                return function(*args, **kwargs)

        return run

    @contextmanager
    def _as_compiled(self) -> Iterator[None]:
        """Sets what compiled code is guarded by: in another state it is compiled anew, without the patterns."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            torch.set_num_threads(before)

    def nodes(self) -> RuntimeNodes | None:
        """The calls of integer and float layers in the code of the last sizes that were compiled; ``None`` before."""
        if self._code is None:
            return None
        integer = Counter(INTEGER.findall(self._code))
        floats = [FloatNode(kind, kind, "no integer pattern", True) for kind in FLOAT.findall(self._code)]
        return RuntimeNodes(dict(integer), tuple(floats))

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        # which ``import torch`` does not load; torchao's patterns do not take ``options={"freezing": True}``
        graph, config = (importlib.import_module(f"torch._inductor.{name}") for name in ("graph", "config"))
        code: list[str] = []
        # not run_and_get_code: it resets Dynamo, and programs from before would be compiled anew, without the patterns
        written = mock.patch.object(graph.GraphLowering, "save_output_code", code.append)
        with silent_torch(), self._as_compiled(), config.patch(freezing=True), written:
            function = torch.compile(self._program.program.module(), dynamic=False)
            try:
                function(*args, **kwargs)
            except Exception as error:  # whatever the compiler says
                raise ExportError(f"{self.runtime} does not compile it: {first_line(error)}") from error
        self._code = "\n".join(code)
        return function
