"""``qtk::fake_quantize_many`` against ``qtk::fake_quantize``."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from qtk.errors import SpecError
from qtk.ops.fake_quantize import fake_quantize
from qtk.ops.fake_quantize_many import fake_quantize_many
from tests.kernels.many_tensors import ZERO_POINTS, columns, tensors


def flat(calls):
    """The arguments of the op."""
    xs, scales, zeros, sizes, *codes = columns(calls)
    return xs, scales, zeros, [s for x, each in zip(xs, sizes, strict=True) for s in each or [-1] * x.ndim], *codes


def leaves(calls):
    return [each for call in calls for each in call[:3] if each is not None and each.requires_grad]


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("zero_point", ZERO_POINTS.values(), ids=ZERO_POINTS)
def test_opcheck(zero_point):
    torch.library.opcheck(torch.ops.qtk.fake_quantize_many.default, flat(tensors(zero_point)[:12]))


@pytest.mark.medium
@pytest.mark.parametrize("wants", [(False, False), (True, False), (True, True)])
def test_opcheck_of_the_backward(wants):
    lists = flat(tensors(torch.int32, grad=False)[:12])
    grads = [torch.ones_like(x) for x in lists[0]]
    torch.library.opcheck(
        torch.ops.qtk.fake_quantize_many_backward.default, (grads, *lists, *([each] * len(grads) for each in wants))
    )


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_point", ZERO_POINTS.values(), ids=ZERO_POINTS)
def test_values_and_gradients_are_those_of_one_call_each(zero_point, kind):
    calls, own_calls = tensors(zero_point, kind), tensors(zero_point, kind)
    results, expected = fake_quantize_many(*columns(calls)), [fake_quantize(*call) for call in own_calls]
    slopes = [torch.randn(result.shape, generator=torch.Generator().manual_seed(3)).to(kind) for result in results]
    torch.autograd.backward(results, slopes)
    torch.autograd.backward(expected, slopes)
    for own, other in zip([*results, *leaves(calls)], [*expected, *leaves(own_calls)], strict=True):
        assert torch.equal(own.detach(), other.detach())
        assert own.stride() == other.stride()
    for own, other in zip(leaves(calls), leaves(own_calls), strict=True):
        assert torch.equal(own.grad, other.grad)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_each_gradient_comes_alone_and_work_for_others_is_not_done(needed):
    calls = tensors(grad=False)
    for place, call in enumerate(calls):
        for leaf, need in zip(call, needed, strict=False):
            leaf.requires_grad_(need and place % 2 == 0)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.qtk.fake_quantize_many_backward.default:
                seen.append(args[-2:])
            return function(*args, **(kwargs or {}))

    loss = sum(result.sum() for result in fake_quantize_many(*columns(calls)))
    with Watch():
        loss.backward()
    for place, call in enumerate(calls):
        assert tuple(leaf.grad is not None for leaf in call[:3]) == tuple(n and place % 2 == 0 for n in needed)
    (wants,) = seen
    assert list(zip(*wants, strict=True)) == [tuple(n and p % 2 == 0 for n in needed[1:]) for p in range(len(calls))]


def test_what_no_loss_depends_on_has_no_gradient():
    calls = tensors()
    results = fake_quantize_many(*columns(calls))
    results[3].sum().backward()
    assert [place for place, call in enumerate(calls) if call[0].grad is not None] == [3]


def test_second_derivatives_are_those_of_one_call_each():
    def second(calls, results):
        first = torch.autograd.grad([each.square().sum() for each in results], leaves(calls), create_graph=True)
        return [*first, *torch.autograd.grad([each.square().sum() for each in first], leaves(calls))]

    calls = tensors()[:8]
    expected = second(calls, [fake_quantize(*call) for call in calls])
    for own, other in zip(second(calls, fake_quantize_many(*columns(calls))), expected, strict=True):
        assert torch.equal(own, other)


@pytest.mark.medium
def test_compiled_it_is_the_same():
    calls = tensors(torch.int32, grad=False)[:7]
    compiled = torch.compile(fake_quantize_many, fullgraph=True, backend="aot_eager")
    for own, other in zip(compiled(*columns(calls)), fake_quantize_many(*columns(calls)), strict=True):
        assert torch.equal(own, other)


def test_make_fx_sees_one_op():
    calls = tensors(torch.int32, grad=False)[:4]
    _, *rest = columns(calls)
    graph = make_fx(lambda xs: fake_quantize_many(xs, *rest))(columns(calls)[0]).graph
    called = [node.target for node in graph.nodes if node.op == "call_function" and "qtk" in str(node.target)]
    assert called == [torch.ops.qtk.fake_quantize_many.default]


def test_nothing_and_what_does_not_fit():
    assert fake_quantize_many([], [], [], [], [], []) == []
    with pytest.raises(SpecError, match="does not fit"):
        fake_quantize_many([torch.zeros(4, 4)], [torch.ones(3)], [None], [(1, -1)], [-8], [7])
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda x: fake_quantize_many([x], [torch.ones(1)], [None], [()], [-8], [7])[0],
                       (torch.ones(2),), (torch.ones(2),))
