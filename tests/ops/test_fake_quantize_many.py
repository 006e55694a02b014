"""``qtk::fake_quantize_many`` against ``qtk::fake_quantize``, and its kernels against those of one tensor."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from qtk.errors import SpecError
from qtk.ops.fake_quantize import fake_quantize
from qtk.ops.fake_quantize_many import fake_quantize_many
from tests.kernels import conformance

one = pytest.importorskip("qtk.kernels.gpu.fake_quantize")
many = pytest.importorskip("qtk.kernels.gpu.fake_quantize_many")
launch = pytest.importorskip("qtk.kernels.gpu.launch")
table = pytest.importorskip("qtk.kernels.gpu.table")
recorded = pytest.importorskip("tests.kernels.gpu.launches").recorded
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ZERO_POINTS = {"symmetric": None, "int32": torch.int32, "learned": torch.float32}
LAYOUTS = ("contiguous", "reversed_axes", "with_gaps")
SLOW = ("channel_last_wide", "block_of_a_wide_axis")  # in the interpreter, and nothing new
CODES = ((-8, 7), (-128, 127), (-64, 64))


def tensors(zero_point=torch.float32, kind=torch.float32, *, grad=True, layout="contiguous"):
    """The arguments of a call for each shape of the conformance tests."""
    calls = []
    for seed, (name, (shape, block_size)) in enumerate(conformance.SHAPES.items()):
        if name in SLOW:
            continue
        codes = CODES[seed % len(CODES)]
        scale, zero = conformance.ranges(shape, block_size, zero_point, *codes, seed=seed)
        x = conformance.LAYOUTS[layout](conformance.values(shape, scale, kind, seed=seed).nan_to_num())
        leaves = [x.detach().requires_grad_(grad), scale.requires_grad_(grad)]
        if zero is not None and zero.is_floating_point():
            zero.requires_grad_(grad)
        calls.append((*leaves, zero, block_size, *codes))
    return calls


def columns(calls):
    return [list(column) for column in zip(*calls, strict=True)]


def flat(calls):
    """The arguments of the op."""
    xs, scales, zeros, sizes, *codes = columns(calls)
    return xs, scales, zeros, [s for x, each in zip(xs, sizes, strict=True) for s in each or [-1] * x.ndim], *codes


def leaves(calls):
    return [each for call in calls for each in call[:3] if each is not None and each.requires_grad]


@pytest.mark.parametrize("zero_point", ZERO_POINTS.values(), ids=ZERO_POINTS)
def test_opcheck(zero_point):
    torch.library.opcheck(torch.ops.qtk.fake_quantize_many.default, flat(tensors(zero_point)[:12]))


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


def on_device(calls):
    return [[each.detach().to(DEVICE) if isinstance(each, torch.Tensor) else each for each in call] for call in calls]


def fill_with_nan(monkeypatch):
    """An element that a kernel does not write is NaN."""
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: real(*args, **options).fill_(torch.nan))


@pytest.mark.pairwise(layout=LAYOUTS, kind=(torch.float32, torch.bfloat16), zero_point=ZERO_POINTS.values())
def test_the_kernel_writes_what_that_of_one_tensor_does(layout, kind, zero_point, monkeypatch):
    calls = on_device(tensors(zero_point, kind, layout=layout))
    expected = [one.fake_quantize(*call) for call in calls]
    fill_with_nan(monkeypatch)
    for own, other in zip(many.fake_quantize_many(*columns(calls)), expected, strict=True):
        assert conformance.same_bits(own, other)
        assert own.stride() == other.stride()


@pytest.mark.pairwise(layout=LAYOUTS, kind=(torch.float32, torch.float16), zero_point=ZERO_POINTS.values(),
                      wants=[(False, False), (True, False), (True, True)])
def test_the_gradients_of_the_kernel_are_those_of_one_tensor(layout, kind, zero_point, wants, monkeypatch):
    calls = on_device(tensors(zero_point, kind))
    generator = torch.Generator().manual_seed(1)
    grads = [conformance.LAYOUTS[layout](torch.randn(call[0].shape, generator=generator).to(kind)) for call in calls]
    grads = [grad.to(DEVICE) for grad in grads]
    expected = [one.fake_quantize_backward(grad, *call, *wants) for grad, call in zip(grads, calls, strict=True)]
    fill_with_nan(monkeypatch)
    found = many.fake_quantize_many_backward(grads, *columns(calls), *([each] * len(calls) for each in wants))
    for own, other in zip(found, expected, strict=True):
        for part, same in zip(own, other, strict=True):
            assert conformance.same_bits(part, same)
    assert not launch.tickets(torch.device(DEVICE), 1).any()


def test_some_of_them_learn_their_range():
    calls = on_device(tensors(grad=False))[:9]
    grads = [torch.randn_like(call[0]) for call in calls]
    wants = [[place % 2 == 0 for place in range(9)], [place % 3 == 0 for place in range(9)]]
    for place, found in enumerate(many.fake_quantize_many_backward(grads, *columns(calls), *wants)):
        expected = one.fake_quantize_backward(grads[place], *calls[place], wants[0][place], wants[1][place])
        assert all(conformance.same_bits(own, other) for own, other in zip(found, expected, strict=True))


@pytest.fixture
def launches(monkeypatch):
    names = recorded(monkeypatch, many, one)
    return lambda: (names.count("many_forward_kernel"), names.count("forward_kernel"))


def test_one_launch_serves_a_class_of_granularity_and_a_dtype(launches):
    weights = [torch.randn(rows, width, device=DEVICE) for rows, width in ((5, 16), (64, 144), (8, 768), (3, 3072))]
    scales = [torch.rand(len(weight), device=DEVICE) + 0.1 for weight in weights]
    calls = [(weight, scale, None, (1, -1), -8, 7) for weight, scale in zip(weights, scales, strict=True)]
    calls += [(weight, scale[:1], None, (), -128, 127) for weight, scale in zip(weights, scales, strict=True)]
    many.fake_quantize_many(*columns(calls))
    assert launches() == (2, 0)


def test_what_cannot_share_a_launch_is_launched_alone(launches):
    base = torch.randn(1025, device=DEVICE)
    calls = [(x, torch.ones(1, device=DEVICE), None, (), -8, 7)
             for x in (base[1:], base[::2], torch.zeros(0, device=DEVICE), base[:1024])]
    for own, call in zip(many.fake_quantize_many(*columns(calls)), calls, strict=True):
        assert torch.equal(own, one.fake_quantize(*call))
    assert launches()[0] == 1


def test_more_tensors_than_a_launch_takes(monkeypatch, launches):
    monkeypatch.setattr(table, "MOST_TENSORS", 3)
    calls = [(torch.randn(16, device=DEVICE), torch.rand(1, device=DEVICE) + 0.1, None, (), -8, 7) for _ in range(7)]
    for own, call in zip(many.fake_quantize_many(*columns(calls)), calls, strict=True):
        assert torch.equal(own, one.fake_quantize(*call))
    assert launches()[0] == 3
