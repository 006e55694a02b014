"""A GPU that is pretended: tensors that say they are on ``cuda:0``, whose numbers are in host memory.

Every op runs on the CPU and gives real numbers, so that whole calibrations run. The ops of qtk run what is registered
for GPUs, with the kernels in Triton's interpreter or, compiled, in the emulator of ``tests/ptx``. What would make the
host wait for a GPU is recorded, each with the line of qtk that asked for it: numbers that are read, shapes that depend
on them, copies that are not asynchronous.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from qtk.numerics import statistics
from qtk.ops import least_candidate, least_output_error
from qtk.ops import statistics as statistics_ops

ROOT = Path(__file__).resolve().parents[1]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
READ = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere",
    "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc",
    "linalg_cholesky", "linalg_inv", "linalg_solve",
}
"""Ops that read numbers of a GPU on the host, by the name of the op."""

COPIES = "_to_copy", "to"
"""Copies to a device; the second within ops, where nothing takes it apart."""

WITHOUT_KERNEL = {"qtk::histogram_and_min_max": statistics_ops._histogram_and_min_max,
                  "qtk::histogram_of_squares": statistics.histogram_of_squares,
                  "qtk::least_candidate": least_candidate._reference,
                  "qtk::least_output_error": least_output_error._reference}
"""Ops of qtk whose reference runs on GPUs."""


@dataclass(frozen=True)
class Wait:
    """What made the host wait, and the innermost line of qtk that asked for it."""

    op: str
    place: str


class OnGpu(Tensor):
    """A tensor on the pretended GPU; ``host`` holds its numbers."""

    host: Tensor
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host):
        # torch's C++ believes in the meta device: the autograd engine would look for streams of a GPU
        return Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device="meta",
        )

    def __init__(self, host):
        self.host = host

    def data_ptr(self):
        return self.host.data_ptr()

    def tolist(self):  # torch has none for subclasses
        return self.cpu().tolist()

    def __repr__(self):
        return f"OnGpu({self.host!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of pretended_gpu()")


class Pretending(TorchDispatchMode):
    """Runs every op on the CPU and records what would make the host wait in ``waits``.

    ``kernels`` are the launches of Triton, ``ops`` the others, by name.
    """

    def __init__(self):
        super().__init__()
        self.waits: list[Wait] = []
        self.kernels: list[str] = []
        self.ops: list[str] = []
        self._pinned: set[int] = set()
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        has_gpu = any(isinstance(tensor, OnGpu) for tensor in tensors)
        device = kwargs.get("device")
        to_gpu = device is not None and device.type in ("cuda", "meta")  # C++ makes its own on the meta device
        if func.namespace == "qtk" and has_gpu:
            with self:  # a mode is off while it handles an op
                if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"):
                    return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
                return WITHOUT_KERNEL[func.name()](*args, **kwargs)
        if not has_gpu and not to_gpu:
            if not kwargs.get("pin_memory"):
                return func(*args, **kwargs)
            result = func(*args, **{**kwargs, "pin_memory": False})
            self._pinned.add(result.data_ptr())
            self._kept.append(result)  # so that no other tensor gets its address
            return result
        self.ops.append(func.name())
        self._record(func, tensors, has_gpu, args, kwargs)
        of_host = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, OnGpu)}
        if device is not None:
            kwargs = {**kwargs, "device": CPU}
        inner_args, inner_kwargs = tree_map_only(OnGpu, lambda tensor: tensor.host, (args, kwargs))
        results = func(*inner_args, **inner_kwargs)
        name = func._schema.name.partition("::")[2]
        stays = device is not None and not to_gpu  # a copy to the CPU
        stays |= name == "copy_" and not isinstance(args[0], OnGpu)
        if stays:
            return results.clone() if name in COPIES and any(results is each for each in inner_args) else results
        return tree_map_only(Tensor, lambda host: of_host[id(host)] if id(host) in of_host else OnGpu(host), results)

    def _record(self, func, tensors, has_gpu, args, kwargs):
        name = func._schema.name.partition("::")[2]
        waits = has_gpu and (name in READ or func is torch.ops.aten.repeat_interleave.Tensor)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and has_gpu:
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            filled = name != "index" and args[2].numel() == 1  # masked_fill
            waits = bool(masks) and not filled
        if name in (*COPIES, "copy_"):
            source = args[0] if name in COPIES else args[1]
            target = kwargs.get("device") if name in COPIES else args[0].device
            other = target is not None and (target.type == "cpu") == isinstance(source, OnGpu)
            on_host = args[0] if name == "copy_" and isinstance(source, OnGpu) else source
            non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
            waits = other and not (non_blocking and on_host.data_ptr() in self._pinned)
        if waits:
            self.waits.append(Wait(name, _place()))


def _place() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/qtk/" in frame.filename or "/tests/" in frame.filename]
    inner = [frame for frame in frames if not frame.filename.endswith("tests/pretend_gpu.py")]
    if not inner:
        return "outside of qtk"
    frame = inner[-1]
    return f"{Path(frame.filename).relative_to(ROOT).as_posix()}:{frame.lineno} {frame.name}"


@contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretending]:
    """While the body runs there is a GPU. What it records is in the result."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    from qtk.kernels.gpu import launch

    pretending = Pretending()

    def on_host(launched, name_of=lambda kernel: kernel.fn.__name__):
        def launch_on_host(self, *args, **kwargs):
            pretending.kernels.append(name_of(self))
            host_args, host_kwargs = tree_map_only(OnGpu, lambda tensor: tensor.host, (args, kwargs))
            with torch.utils._python_dispatch._disable_current_modes():
                return launched(self, *host_args, **host_kwargs)

        return launch_on_host

    def again(compiled, grid):
        launched = on_host(lambda _, *args: launch_compiled(compiled, grid)(*args), lambda _: compiled.name)
        return functools.partial(launched, compiled)

    class Event:
        def __init__(self, device=None):
            pass

        def record(self):
            pass

        def query(self):
            return True

    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(GridExecutor, "__call__", on_host(GridExecutor.__call__))
    monkeypatch.setattr(JITFunction, "run", on_host(JITFunction.run))  # the emulator's, the first time
    launch_compiled = CompiledKernel.__getitem__
    monkeypatch.setattr(CompiledKernel, "__getitem__", again)  # and from then on
    monkeypatch.setattr(launch, "_TICKETS", {})
    host = {"on_device_of": lambda x: _nothing(), "programs": lambda device: 6, "triton_unavailable": lambda: None,
            "is_traced": lambda: False, "tickets": lambda device, count: _tickets(count)}
    for module in [module for name, module in sys.modules.items() if name.startswith("qtk.")]:
        for name, stand_in in host.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with pretending:
            yield pretending
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
        monkeypatch.undo()


@contextmanager
def _nothing():
    yield


def _tickets(count):
    return torch.zeros(max(count, 64), dtype=torch.int32, device=GPU)


def to_gpu(value):
    """A module, moved in place, or tensors, on the pretended GPU."""
    if isinstance(value, nn.Module):
        return value._apply(_moved)
    return tree_map_only(Tensor, _moved, value)


def _moved(tensor: Tensor) -> Tensor:
    if isinstance(tensor, OnGpu):
        return tensor
    return OnGpu(tensor.detach().clone()).requires_grad_(tensor.requires_grad)
