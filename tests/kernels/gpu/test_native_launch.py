"""Launches by C++: what a compiled kernel takes, and on a GPU that calls after the first are made without Python."""

import os
import struct
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from qtk.kernels.backends import load_native
from qtk.numerics import affine

launch = pytest.importorskip("qtk.kernels.gpu.launch")
native_launch = pytest.importorskip("qtk.kernels.gpu.native_launch")
fake_quantize = pytest.importorskip("qtk.kernels.gpu.fake_quantize")
Role = native_launch.Role

PARAMETERS = '''
import re, struct
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

triton.runtime.driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32), utils=SimpleNamespace(unload_module=lambda module: None)))

def load(self):
    self.module, self.function, self._run = 0, 0, lambda *arguments: None

CompiledKernel._init_handles = load
from qtk.kernels.gpu import fake_quantize, launch, native_launch
SIZES = {native_launch.Role.INT32: "32", native_launch.Role.FLOAT32: "32"}
for shape, block, dtype in (((512, 512), (), torch.float32), ((512, 512), (1, -1), torch.bfloat16),
                            ((4095, 197), (1, -1), torch.float32), ((64, 3, 5, 5), (-1, 1, -1, -1), torch.float32),
                            ((512, 512), (1, 32), torch.float16)):
    x = torch.randn(shape).to(dtype)
    scales = 1
    for axis, size in enumerate(block):
        scales *= 1 if size == -1 else shape[axis] // size
    scale = torch.full((scales,) if not block else tuple(
        1 if size == -1 else shape[axis] // size for axis, size in enumerate(block)), 0.03)
    scale = scale.flatten() if sum(size > 1 for size in scale.shape) < 2 else scale
    for zero in (None, torch.zeros_like(scale)):
        launch._REPEATABLE.clear()
        fake_quantize.fake_quantize(x, scale, zero, block, -128, 127)
        (kept,) = launch._REPEATABLE.values()
        text = kept.compiled.asm["ptx"]
        found = re.findall(r"[.]param [.][a-z]+(32|64)", text[text.index(".entry"):text.index("{")])
        given = native_launch.parameters(kept)
        assert found == [SIZES.get(role, "64") for role, _ in given], (found, given)
        roles = [role for role, _ in given]
        assert roles[:3] == [0, 1, 1], roles
        assert (native_launch.Role.ZERO_POINT in roles) == (zero is not None)
        assert not native_launch.needs_more(kept.compiled.metadata)
print("checked")
'''


@pytest.mark.kernels(canary=False)
@pytest.mark.medium
def test_parameters_are_those_of_the_machine_code():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", PARAMETERS]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "checked" in run.stdout, run.stderr


def repeatable(signature, arguments, places):
    compiled = SimpleNamespace(src=SimpleNamespace(signature=signature))
    return launch.Repeatable(compiled, (1, 1, 1), arguments, places)


def test_numbers_are_bits_and_what_was_compiled_in_is_left_out():
    kept = repeatable({"x_at": "*fp32", "y_at": "*fp32", "qmin": "fp32", "turns": "i32", "one": "constexpr"},
                      [None, None, -8.0, 7, 1], ((0, 0), (1, 1)))
    bits = struct.unpack("<I", struct.pack("<f", -8.0))[0]
    assert native_launch.parameters(kept) == [
        (Role.INPUT, 0), (Role.RESULT, 0), (Role.FLOAT32, bits), (Role.INT32, 7), (Role.NOTHING, 0), (Role.NOTHING, 0)]


def test_a_parameter_without_a_role_is_not_handed_over():
    assert native_launch.parameters(repeatable({"x_at": "*fp32"}, [None], ())) is None


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available() or load_native() is not None,
                               reason="needs a GPU and the C++ library")


@pytest.fixture
def without_python(monkeypatch):
    """Calls by Python fail once this is called."""
    def refuse(*given):
        raise AssertionError("this call went through Python")

    return lambda: monkeypatch.setattr(fake_quantize, "forward", refuse)


CALLS = {
    "tensor": ((64, 512), (), torch.float32, False), "rows": ((64, 512), (1, -1), torch.bfloat16, True),
    "channels last": ((4, 8, 16, 16), (), torch.float16, True), "blocks": ((64, 512), (1, 32), torch.float32, False),
}


def given(shape, block, dtype, asymmetric):
    x = torch.randn(shape, device="cuda").to(dtype)
    if len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    sizes = {(): (1,), (1, -1): (64,), (1, 32): (64, 16)}[block]
    scale = torch.rand(sizes, device="cuda") * 0.1 + 0.01
    return x, scale, torch.full(sizes, 3.0, device="cuda") if asymmetric else None, block, -8, 7


@needs_gpu
@pytest.mark.parametrize("name", CALLS)
def test_calls_after_the_first_are_launched_without_python(name, without_python):
    torch.ops.qtk.fake_quantize(*given(*CALLS[name]))
    without_python()
    for _ in range(2):
        call = given(*CALLS[name])
        found = torch.ops.qtk.fake_quantize(*call)
        assert torch.equal(found, affine.fake_quantize(*call))
        assert found.stride() == call[0].stride()


@needs_gpu
def test_a_tensor_that_begins_anywhere_is_not_launched_so():
    call = given(*CALLS["tensor"])
    torch.ops.qtk.fake_quantize(*call)
    x = torch.randn(64 * 512 + 1, device="cuda")[1:].view(64, 512)
    assert torch.equal(torch.ops.qtk.fake_quantize(x, *call[1:]), affine.fake_quantize(x, *call[1:]))


@needs_gpu
def test_threads_streams_and_cuda_graphs():
    call = given(*CALLS["rows"])
    torch.ops.qtk.fake_quantize(*call)
    expected, found = affine.fake_quantize(*call), []
    thread = threading.Thread(target=lambda: found.append(torch.ops.qtk.fake_quantize(*call)))
    thread.start()
    thread.join()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found.append(torch.ops.qtk.fake_quantize(*call))
    torch.cuda.current_stream().wait_stream(stream)
    graph, x = torch.cuda.CUDAGraph(), torch.zeros_like(call[0])
    with torch.cuda.graph(graph):
        found.append(torch.ops.qtk.fake_quantize(x, *call[1:]))
    x.copy_(call[0])
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(each, expected) for each in found)
