"""Every operator has in the dispatcher what its row says: schema, kernels, gradient."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import qtk.ops
from qtk.ops import registration
from qtk.ops.registration import OPERATORS, Kernel, Operator, register

for module in pkgutil.iter_modules(qtk.ops.__path__):
    importlib.import_module(f"qtk.ops.{module.name}")
OURS = {name: operator for name, operator in OPERATORS.items() if "doctest" not in name and "test_" not in name}
operators = pytest.mark.parametrize("operator", OURS.values(), ids=OURS)


def has(operator, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name, key)


def test_no_other_file_of_the_room_calls_torch_library():
    calls = re.compile(r"torch\.library\.(define|impl|register|custom)")
    files = {file.name for file in Path(qtk.ops.__file__).parent.glob("*.py") if calls.search(file.read_text())}
    assert files == {"registration.py"}


@operators
def test_the_schema_is_the_dispatchers(operator):
    """Of a native operator, the one of the C++ library: saved programs name it."""
    packet = getattr(torch.ops.qtk, operator.name.removeprefix("qtk::"))
    assert str(torch._C.parse_schema(f"qtk::{operator.schema}")) == str(packet.default._schema)


@operators
def test_it_has_a_reference_and_the_kernels_it_names(operator):
    assert has(operator, "CompositeExplicitAutograd")
    assert has(operator, "CUDA") == (operator.gpu is not None)
    assert has(operator, "CPU") or not (operator.native and registration.NATIVE)


@operators
def test_a_kernel_takes_the_arguments_of_its_operator(operator):
    pytest.importorskip("triton")
    if isinstance(operator.gpu, Kernel):
        module = importlib.import_module(f"qtk.kernels.gpu.{operator.gpu.module}")
        code = getattr(module, operator.gpu.function).__code__
        assert code.co_argcount == len(torch._C.parse_schema(f"qtk::{operator.schema}").arguments)


def test_where_triton_does_not_run_the_reference_does(monkeypatch):
    operator = Operator("any(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like, lambda x: x + 2, None, False)
    assert operator.name == "qtk::any"
    monkeypatch.setattr(registration, "triton_unavailable", lambda: "not there")
    assert operator.on_gpu(1) == 2
    monkeypatch.setattr(registration, "triton_unavailable", lambda: None)
    assert operator.on_gpu(1) == 3


def test_a_registered_operator_has_its_gradient_and_is_traced():
    def save(ctx, inputs, output):
        ctx.factor = inputs[1]

    op = register(
        "test_scaled(Tensor x, float factor) -> Tensor", lambda x, factor: x.detach() * factor,
        registration.like_first, gradient=registration.Gradient(save, lambda ctx, grad: (grad * ctx.factor, None)),
    )
    x = torch.randn(3, requires_grad=True)
    torch.library.opcheck(op, (x, 3.0))
    assert torch.equal(torch.autograd.grad(op(x, 3.0).sum(), x)[0], torch.full((3,), 3.0))
