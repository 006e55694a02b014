"""The Triton kernels for many tensors against the kernels for one; on a GPU, else in Triton's interpreter."""

import pytest
import torch

from tests.kernels import conformance
from tests.kernels.many_tensors import ZERO_POINTS, columns, tensors

one = pytest.importorskip("qtk.kernels.gpu.fake_quantize")
many = pytest.importorskip("qtk.kernels.gpu.fake_quantize_many")
launch = pytest.importorskip("qtk.kernels.gpu.launch")
table = pytest.importorskip("qtk.kernels.gpu.table")
recorded = pytest.importorskip("tests.kernels.gpu.launches").recorded
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # of the interpreter
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = ("contiguous", "reversed_axes", "with_gaps")


def on_device(calls):
    return [[each.detach().to(DEVICE) if isinstance(each, torch.Tensor) else each for each in call] for call in calls]


def fill_with_nan(monkeypatch):
    """An element that a kernel does not write is NaN."""
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: real(*args, **options).fill_(torch.nan))


@pytest.mark.medium
@pytest.mark.pairwise(layout=LAYOUTS, kind=(torch.float32, torch.bfloat16), zero_point=ZERO_POINTS.values())
def test_the_kernel_writes_what_that_of_one_tensor_does(layout, kind, zero_point, monkeypatch):
    calls = on_device(tensors(zero_point, kind, layout=layout))
    expected = [one.fake_quantize(*call) for call in calls]
    fill_with_nan(monkeypatch)
    for own, other in zip(many.fake_quantize_many(*columns(calls)), expected, strict=True):
        assert conformance.same_bits(own, other)
        assert own.stride() == other.stride()


@pytest.mark.medium
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


@pytest.mark.medium
def test_some_of_them_learn_their_range():
    calls = on_device(tensors(grad=False))[:9]
    grads = [torch.randn_like(call[0]) for call in calls]
    wants = [[place % 2 == 0 for place in range(9)], [place % 3 == 0 for place in range(9)]]
    for place, found in enumerate(many.fake_quantize_many_backward(grads, *columns(calls), *wants)):
        expected = one.fake_quantize_backward(grads[place], *calls[place], wants[0][place], wants[1][place])
        assert all(conformance.same_bits(own, other) for own, other in zip(found, expected, strict=True))


@pytest.fixture
def launches(monkeypatch):
    names = recorded(monkeypatch, many)
    return lambda: (names.count("many_forward_kernel"), names.count("forward_kernel"))


@pytest.mark.medium
def test_one_launch_serves_a_class_of_granularity_and_a_dtype(launches):
    weights = [torch.randn(rows, width, device=DEVICE) for rows, width in ((5, 16), (64, 144), (8, 768), (3, 3072))]
    scales = [torch.rand(len(weight), device=DEVICE) + 0.1 for weight in weights]
    calls = [(weight, scale, None, (1, -1), -8, 7) for weight, scale in zip(weights, scales, strict=True)]
    calls += [(weight, scale[:1], None, (), -128, 127) for weight, scale in zip(weights, scales, strict=True)]
    many.fake_quantize_many(*columns(calls))
    assert launches() == (2, 0)


@pytest.mark.medium
def test_what_cannot_share_a_launch_is_launched_alone(launches):
    base = torch.randn(1025, device=DEVICE)
    calls = [(x, torch.ones(1, device=DEVICE), None, (), -8, 7)
             for x in (base[1:], base[::2], torch.zeros(0, device=DEVICE), base[:1024])]
    for own, call in zip(many.fake_quantize_many(*columns(calls)), calls, strict=True):
        assert torch.equal(own, one.fake_quantize(*call))
    assert launches()[0] == 1


@pytest.mark.medium
def test_more_tensors_than_a_launch_takes(monkeypatch, launches):
    monkeypatch.setattr(table, "MOST_TENSORS", 3)
    calls = [(torch.randn(16, device=DEVICE), torch.rand(1, device=DEVICE) + 0.1, None, (), -8, 7) for _ in range(7)]
    for own, call in zip(many.fake_quantize_many(*columns(calls)), calls, strict=True):
        assert torch.equal(own, one.fake_quantize(*call))
    assert launches()[0] == 3
