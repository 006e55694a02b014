import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from qtk.ops.decomposed import FakeQuantize
from qtk.ops.fake_quantize import fake_quantize
from tests.kernels import conformance


def backward(grad, x, scale, zero_point, block_size, qmin, qmax, wants_scale, wants_zero_point):
    leaves = [x.clone().requires_grad_(), scale.clone().requires_grad_(wants_scale)]
    zero = torch.zeros_like(scale) if zero_point is None else zero_point.float()
    leaves.append(zero.clone().requires_grad_(wants_zero_point))
    result = FakeQuantize.apply(*leaves, block_size, qmin, qmax)
    return torch.autograd.grad(result, [leaf for leaf in leaves if leaf.requires_grad], grad)


class TestDecomposed(conformance.Conformance):
    forward = staticmethod(FakeQuantize.apply)
    backward = staticmethod(backward)


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [
    "channel_last_wide", "block_deep",
    *(pytest.param(case, marks=pytest.mark.slow) for case in ("tensor_large", "channel_middle", "block_tiles")),
])
def test_inductor_computes_the_reference(case):
    torch._dynamo.reset()
    shape, block_size = conformance.SHAPES[case]
    scale, zero = conformance.ranges(shape, block_size, torch.float32, -8, 7)
    compiled = torch.compile(fake_quantize, fullgraph=True)

    def through_it(grad, x, scale, zero, *spec):
        leaves = [x.clone().requires_grad_(), scale.clone().requires_grad_(), zero.clone().requires_grad_()]
        return torch.autograd.grad(compiled(*leaves, *spec[:3]), leaves, grad)

    x = conformance.values(shape, scale, torch.float32)
    conformance.check_forward(compiled, x, scale, zero, (block_size, -8, 7))
    conformance.check_backward(through_it, torch.randn(shape), x.nan_to_num(), scale, zero, (block_size, -8, 7))


@pytest.mark.medium
def test_no_call_of_the_op_is_left_in_a_compiled_graph():
    torch._dynamo.reset()
    seen = []

    def compiler(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    function = torch.compile(fake_quantize, fullgraph=True, backend=backend)
    function(torch.randn(4, requires_grad=True), torch.ones(1), None, (), -8, 7).sum().backward()
    assert seen
    assert not [target for target in seen if "qtk" in target]
