from collections import OrderedDict, defaultdict, deque
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from qtk.calls.inputs import check_inputs, input_leaves, is_free
from qtk.calls.signature import input_names
from qtk.errors import CaptureError
from qtk.workflow.prepare import prepare_model
from tests.zoo.models import ZOO


def prepared(name, **options):
    return prepare_model(ZOO[name].model(), ZOO[name].inputs(), verify=False, **options)


@pytest.mark.medium
def test_a_fixed_axis_is_checked_and_the_batch_is_free():
    model = prepared("two_inputs")
    image, vector = ZOO["two_inputs"].inputs(5)
    assert model(image, vector=vector).shape == (5, 4)
    with pytest.raises(CaptureError, match=r"input vector has shape \(5, 7\), the model was captured for \(any, 8\)"):
        model(image, vector[:, :7])
    with pytest.raises(CaptureError, match=r"input image has shape \(5, 3, 8\)"):
        model(image[..., 0], vector)


def test_a_static_batch_is_checked():
    model = prepared("splits", dynamic_shapes=None)
    model(ZOO["splits"].inputs(2))
    with pytest.raises(CaptureError, match=r"has shape \(3, 8\), the model was captured for \(2, 8\)"):
        model(ZOO["splits"].inputs(3))


def test_a_constant_written_into_the_graph_is_checked():
    model = prepared("keyword_input")
    inputs = ZOO["keyword_input"].inputs()
    model(**inputs)
    with pytest.raises(CaptureError, match=r"input scale is 2\.0, and 0\.5 is written into the captured graph"):
        model(**{**inputs, "scale": 2.0})


def test_nested_inputs_are_found_in_any_order_of_their_keys():
    model = prepared("nested_input")
    pair, options, scale, double = ZOO["nested_input"].inputs(3)
    turned = {"nothing": None, "extra": options["extra"]}
    assert torch.equal(model(pair, turned, scale, double), model(pair, options, scale, double))
    with pytest.raises(CaptureError, match="input double is False"):
        model(pair, turned, scale, double=False)


def test_a_call_that_does_not_bind_is_left_to_python():
    model = prepared("two_inputs")
    with pytest.raises(TypeError, match="missing"):
        model()
    check_inputs(model.graph, (), {"unknown": 1})


def test_only_a_size_that_may_vary_is_free():
    assert not is_free(3)
    value = next(iter(prepared("splits").graph.find_nodes(op="placeholder"))).meta["val"]
    assert [is_free(size) for size in value.shape] == [True, False]


class Masked(nn.Module):
    def forward(self, x, mask=None, scale=1.0):
        return x * scale if mask is None else x * mask * scale


X = torch.randn(2, 8)


@pytest.mark.parametrize(
    ("captured", "call", "expected"),
    [
        ((X,), ((X, None), {}), X),
        ((X,), ((X,), {"scale": 1.0, "mask": None}), X),
        ((X, None), ((X,), {}), X),
        ((X, None), ((), {"x": X}), X),
        ({"x": X, "mask": X}, ((X, X), {}), X * X),
        ({"mask": X, "x": X}, ((), {"x": X, "mask": X}), X * X),
    ],
)
def test_defaults_may_be_given_or_left_out(captured, call, expected):
    args, kwargs = call
    assert torch.equal(prepare_model(Masked(), captured)(*args, **kwargs), expected)


@pytest.mark.parametrize(
    ("captured", "call", "message"),
    [
        ((X,), ((X, X), {}), "input mask was not given when the model was captured, and its default None"),
        ((X,), ((X,), {"scale": 2.0}), "input scale was not given"),
        ((X, None), ((X, X), {}), r"input mask is a tensor of shape \(2, 8\), and None is written"),
        ((X, X), ((X, None), {}), "input mask is None, the model was captured with a tensor"),
        ({"x": X, "mask": X}, ((), {"x": X}), "input mask is None, the model was captured with a tensor"),
    ],
)
def test_other_arguments_than_the_captured_ones_are_refused(captured, call, message):
    args, kwargs = call
    with pytest.raises(CaptureError, match=message):
        prepare_model(Masked(), captured)(*args, **kwargs)


class Sums(nn.Module):
    def forward(self, parts):
        return sum(parts["list"]) + parts["one"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"list": [X] * 3, "one": X}, r"input parts\['list'\] has 3 items, the model was captured for 2"),
        ({"list": [X], "one": X}, r"input parts\['list'\] has 1 items"),
        ({"list": X, "one": X}, r"input parts\['list'\] is a Tensor, the model was captured for a list"),
        ({"list": [X] * 2}, r"input parts has the keys \['list'\], the model was captured for \['list', 'one'\]"),
        ({"list": [X] * 2, "one": X, "two": X}, "input parts has the keys"),
    ],
)
def test_nesting_is_checked_to_the_bottom(parts, message):
    model = prepare_model(Sums(), ({"list": [X, X], "one": X},))
    assert torch.equal(model({"one": X, "list": (X, X)}), 3 * X)
    with pytest.raises(CaptureError, match=message):
        model(parts)


class State(NamedTuple):
    h: Tensor
    c: Tensor


class Cell(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.scale = kind, nn.Parameter(torch.tensor(2.0))

    def forward(self, x, state):
        h, c = state.values() if isinstance(state, dict) else state
        return x, make(self.kind, self.scale * h, c + x)


def make(kind, h, c):
    match kind:
        case _ if kind is State:
            return State(h, c)
        case _ if kind is defaultdict:
            return defaultdict(list, h=h, c=c)
        case _ if issubclass(kind, dict):
            return kind(h=h, c=c)
    return kind([h, c])


@pytest.mark.parametrize(("kind", "known"), [
    (State, "1 items, the model was captured for 2"), (tuple, "1 items, the model was captured for 2"),
    (deque, "a tuple, the model was captured for a deque"), (OrderedDict, "a tuple, .* for a OrderedDict"),
    (defaultdict, "a tuple, the model was captured for a defaultdict"),
])
def test_any_container_that_torch_export_takes_is_an_input_and_its_nesting_is_checked(kind, known):
    model, state = Cell(kind), make(kind, X, 3 * X)
    prepared_model = prepare_model(model, (X, state))
    assert prepared_model.report.complete
    (_, ours), (_, theirs) = prepared_model(X, state), model(X, state)
    assert type(ours) is kind
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(CaptureError, match=f"input state (has|is) {known}"):
        prepared_model(X, (X,))
    with pytest.raises(CaptureError, match=f"input state is a Tensor, the model was captured for a {kind.__name__}"):
        prepared_model(X, X)


def test_a_defaultdict_has_the_keys_of_capture():
    model = prepare_model(Cell(defaultdict), (X, make(defaultdict, X, X)))
    with pytest.raises(CaptureError, match=r"input state has the keys \['c'\], .* captured for \['h', 'c'\]"):
        model(X, defaultdict(list, c=X))


def test_the_leaves_of_a_call_stand_in_the_order_of_the_placeholders():
    model, inputs = prepared("keyword_input"), ZOO["keyword_input"].inputs()
    turned = dict(reversed(inputs.items()))
    by_name = dict(zip(input_names(model), input_leaves(model.graph, (), turned), strict=True))
    assert set(by_name) == set(inputs)
    assert all(by_name[name] is value for name, value in inputs.items())


def test_nested_arguments_are_flat():
    model, (pair, options, scale, flag) = prepared("nested_input"), ZOO["nested_input"].inputs()
    leaves = input_leaves(model.graph, (pair, options, scale, flag), {})
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert all(a is b for a, b in zip(tensors, [*pair, options["extra"]], strict=True))
    assert leaves[-2:] == [3, True]


@pytest.mark.medium
@pytest.mark.parametrize("count", [1, 3])
def test_other_arguments_are_refused_with_the_names(count):
    model = prepared("two_inputs")
    x = torch.randn(2, 4)
    for args, kwargs in (((x,) * count, {}), (([x] * count,), {}), ((), {"image": x, "picture": x})):
        with pytest.raises(CaptureError, match=r"\(image, vector\)"):
            input_leaves(model.graph, args, kwargs)


class Open(nn.Module):
    """As models of Hugging Face: named inputs, and ``**kwargs`` for whatever else."""

    def forward(self, ids, mask=None, *, scale=1.0, **kwargs):
        return ids * scale + kwargs.get("shift", 0.0) if mask is None else ids * mask * scale


@pytest.mark.parametrize(("captured", "call", "expected"), [
    ({"ids": X, "mask": X}, ((X, X), {}), X * X),
    ({"ids": X, "mask": X}, ((X,), {"mask": X, "scale": 1.0}), X * X),
    ({"ids": X, "mask": None}, ((X,), {}), X),
    ({"ids": X}, ((X,), {"mask": None}), X),
    ({"ids": X, "shift": X}, ((X,), {"shift": X}), X + X),
])
def test_defaults_may_be_given_or_left_out_beside_open_keywords(captured, call, expected):
    args, kwargs = call
    assert torch.equal(prepare_model(Open(), captured)(*args, **kwargs), expected)


@pytest.mark.parametrize(("captured", "call", "said"), [
    ({"ids": X, "mask": X}, {"ids": X, "mask": X, "scale": 2.0}, r"input scale was not given .* default 1\.0"),
    ({"ids": X, "mask": X}, {"ids": X}, "input mask is None, the model was captured with a tensor"),
    ({"ids": X}, {"ids": X, "shift": X}, "input shift was not given when the model was captured; leave it out"),
    ({"ids": X, "shift": X}, {"ids": X}, "input shift was given when the model was captured, and is left out"),
])
def test_another_call_is_named_beside_open_keywords(captured, call, said):
    with pytest.raises(CaptureError, match=said):
        prepare_model(Open(), captured)(**call)


def test_kinds_of_numbers_are_checked_and_widths_are_not():
    floats, ids = prepare_model(nn.Linear(8, 4), X), prepare_model(nn.Embedding(9, 4), torch.zeros(2, 3).long())
    with pytest.raises(CaptureError, match=r"uint8, the model was captured for float32: convert, or scale to \[0, 1\]"):
        floats((X * 9).byte())
    with pytest.raises(CaptureError, match="is float32, the model was captured for int64: convert"):
        ids(torch.zeros(2, 3))
    assert ids(torch.zeros(5, 3).int()).shape == (5, 3, 4)
    assert floats.half()(X.half()).dtype == torch.float16


class Placed(nn.Module):
    """Reshapes by the batch of the positions, which must be the batch of the inputs."""

    def forward(self, x, positions):
        return x.reshape(positions.shape[0], -1) * positions.sum(1, keepdim=True)


def test_sizes_that_the_graph_needs_equal_are_named_where_it_fails():
    model = prepare_model(Placed(), (torch.randn(2, 6), torch.randn(2, 5)), dynamic_shapes="all")
    assert model(torch.randn(3, 6), torch.randn(3, 4)).shape == (3, 6)
    for _ in range(2):  # known or not
        with pytest.raises(CaptureError, match=r"\nx.shape\[0\] is 3 and positions.shape\[0\] is 2, which the"):
            model(torch.randn(3, 5), torch.randn(2, 4))
