import copy

import pytest
import torch
from torch import nn
from torch.export import Dim, ShapesCollection

import qtk
from qtk.calls.states import set_states
from qtk.capture.free_shapes import (
    batch_elsewhere,
    check_dynamic_shapes,
    free_shapes,
    leaf_numbers,
    shapes_like,
    token_axes,
    with_batch_of_two,
)
from qtk.errors import CaptureError
from tests.capture.caches import Cache


class Streaming(nn.Module):
    """A step of a recurrent net: the batch is axis 0 of the input and axis 1 of the states."""

    def __init__(self):
        super().__init__()
        self.net, self.head = nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x, h, c):
        y, (h, c) = self.net(x, (h, c))
        return self.head(y), h, c


def step(batch, frames=1):
    return torch.randn(batch, frames, 8), torch.randn(2, batch, 16), torch.randn(2, batch, 16)


class HeldStates(Streaming):
    def forward(self, h, c, x):
        return super().forward(x, h, c)


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("batch", [16, 5, 2, 1])  # 16 is the width of the states, 2 their layers
def test_the_batch_is_found_on_another_axis_of_the_states(batch):
    model = Streaming().eval()
    prepared = qtk.prepare_model(model, step(batch))
    assert prepared.report.reasons == ()
    assert [tuple(map(str, each.meta["val"].shape)) for each in prepared.graph.find_nodes(op="placeholder")][1:] == [
        ("2", str(prepared.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]), "16")] * 2
    for other in (3, 1):
        inputs = step(other)
        for a, b in zip(prepared(*inputs), model(*inputs), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(CaptureError, match=r"input h has shape \(2, 3, 15\)"):
        prepared(step(3)[0], torch.randn(2, 3, 15), torch.randn(2, 3, 16))


class Stacked(nn.Module):
    """Its two states come as one tensor, of which it takes one by one."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)

    def forward(self, x, state):
        h, c = self.cell(x, (state[0], state[-1]))
        return h, torch.stack([h, c])


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("batch", [5, 2, 1])
@pytest.mark.parametrize("dynamic_shapes", ["batch", "all"])
def test_an_axis_that_is_read_index_by_index_is_no_batch(batch, dynamic_shapes):
    model = Stacked().eval()
    prepared = qtk.prepare_model(model, (torch.ones(batch, 8), torch.ones(2, batch, 16)), dynamic_shapes=dynamic_shapes)
    set_states(prepared, {"state": 1})
    x, state = (node.meta["val"].shape for node in prepared.graph.find_nodes(op="placeholder"))
    assert (state[0], str(state[1])) == (2, str(x[0]))
    inputs = torch.randn(3, 8), torch.randn(2, 3, 16)
    assert torch.equal(prepared(*inputs)[1], model(*inputs)[1])


def test_an_axis_of_which_one_index_is_read_stays_free():
    class First(nn.Module):
        def forward(self, x):
            return 2 * x[0]

    prepared = qtk.prepare_model(First(), torch.ones(1, 3))
    assert torch.equal(prepared(torch.ones(4, 3)), torch.full((3,), 2.0))


@pytest.mark.medium
def test_the_batch_is_found_where_the_states_come_first():
    model = HeldStates().eval()
    prepared = qtk.prepare_model(model, (*step(5)[1:], step(5)[0]))
    x, h, c = step(3)
    assert torch.equal(prepared(h, c, x)[0], model(h, c, x)[0])


def test_an_axis_as_long_as_a_table_is_no_batch():
    class Lookup(nn.Module):
        def forward(self, x, table):
            return x @ table

    prepared = qtk.prepare_model(Lookup(), (torch.randn(3, 4), torch.randn(4, 2)))
    with pytest.raises(CaptureError, match=r"captured for \(any, 4\)"):
        prepared(torch.randn(3, 5), torch.randn(5, 2))


def test_a_batch_that_the_code_fixes_is_still_reported():
    class Fixed(nn.Module):
        def forward(self, x, y):
            return x.reshape(3, 2, 2).sum() + y

    prepared = qtk.prepare_model(Fixed(), (torch.ones(3, 4), torch.ones(5, 3)))
    assert "export: the code of the model fixes axis 0 of input x to 3" in prepared.report.reasons


def test_candidates_for_the_batch_are_as_long_as_a_fixed_axis_0():
    args = torch.ones(5, 1, 8), [torch.ones(2, 5, 5), torch.ones(8)]
    inputs = {"x": args[0], "h": args[1][0], "w": args[1][1]}
    assert batch_elsewhere(inputs, args, {}) == {(1, 1), (1, 2), (0, 2)}


def test_lengths_of_sequences_hold_the_batch_though_the_first_axis_of_the_first_input_is_free():
    x, table, lengths = torch.ones(7, 3, 8), torch.ones(3, 3), torch.ones(3, dtype=torch.int64)
    first = torch.export.export(
        torch.nn.Identity(), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False
    ).graph.find_nodes(op="placeholder")[0].meta["val"]
    assert batch_elsewhere({"x": first, "table": table}, (x, table), {}) == ()
    assert batch_elsewhere({"x": first, "lengths": lengths}, (x, lengths), {}) == {(0, 1)}


def test_shapes_are_free_where_they_are_asked_for():
    class Two(nn.Module):
        def forward(self, x, *, pair):
            return x + pair[0] + pair[1]

    x, a, b = torch.ones(2, 3), torch.ones(2, 3), torch.ones(())
    shapes = free_shapes(Two(), (x,), {"pair": [a, b]}, lambda axis: axis in ((0, 0), (1, 1)))
    assert shapes == {"x": {0: Dim.AUTO}, "pair": [{1: Dim.AUTO}, None]}
    assert leaf_numbers((x,), {"pair": [a, b]}) == {id(x): 0, id(a): 1, id(b): 2}


NAMES = {"x": {0: "batch", 1: "frames"}, "h": {1: "batch"}, "c": {1: "batch"}}


@pytest.mark.medium
def test_axes_are_freed_by_name_and_compared_by_name_in_every_call():
    model = Streaming().eval()
    prepared = qtk.prepare_model(model, step(5, 4), dynamic_shapes=NAMES)
    assert prepared.sizes.names == {
        ("x", 0): "batch", ("x", 1): "frames", ("h", 1): "batch", ("c", 1): "batch"}
    inputs = step(3, 7)
    assert torch.equal(prepared(*inputs)[0], model(*inputs)[0])
    with pytest.raises(CaptureError, match=r"x.shape\[0\] is 3 and h.shape\[1\] is 2; both are 'batch'"):
        prepared(step(3, 7)[0], *step(2)[1:])


class Add(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, pair, *, last=0):
        return self.fc(x) + pair["a"] + pair["b"][0] + last


X = torch.randn(3, 5, 4)


@pytest.mark.parametrize("shapes", [
    {"x": {0: "n", 1: "t"}, "pair": {"a": {0: "n", 1: "t"}, "b": [{0: "n", 1: "t"}]}, "last": {0: "n", 1: "t"}},
    {"last": ["n", "t", None], "x": ("n", "t", None), "pair": {"b": [("n", "t", None)], "a": {0: "n", 1: "t"}}},
])
def test_names_are_nested_like_the_inputs(shapes):
    model = Add().eval()
    prepared = qtk.prepare_model(model, {"last": X, "pair": {"a": X, "b": [X]}, "x": X}, dynamic_shapes=shapes)
    assert set(prepared.sizes.names.values()) == {"n", "t"}
    assert len(prepared.sizes.names) == 8
    x = torch.randn(2, 7, 4)
    assert torch.equal(prepared(x, {"a": x, "b": [x]}, last=x), model(x, {"a": x, "b": [x]}, last=x))


@pytest.mark.parametrize(("shapes", "error"), [
    ({"y": {0: "n"}}, r"dynamic_shapes names 'y', and the arguments of the call are \['x', 'pair'\]"),
    ({"x": {3: "n"}}, r"dynamic_shapes has axis 3 of x, whose axes are 0 to 2"),
    ({"x": {0: "n", 1: "n"}}, r"calls both x.shape\[0\] and x.shape\[1\] 'n', which are 3 and 5 in the example"),
    ({"x": {0: "n"}}, r"calls x.shape\[0\] 'n', and it is 3 in the graph: the code of the model fixes it"),
    ({"x": {0: "n"}, "pair": {"a": {0: "m"}, "b": [{0: "n"}]}}, r"'m', and in the code .* called 'n'; give both one"),
])
def test_a_name_that_cannot_be_is_an_error_that_says_why(shapes, error):
    with pytest.raises(CaptureError, match=error):
        qtk.prepare_model(Add().eval(), (X, {"a": X, "b": [X]}), dynamic_shapes=shapes)


def test_a_named_axis_of_length_1_is_named_as_such():
    with pytest.raises(CaptureError, match=r"'n', and it is 1 in the graph: an axis of length 1 in the"):
        qtk.prepare_model(nn.Linear(4, 4), torch.randn(1, 4), dynamic_shapes={"input": {0: "n"}})


def test_tokens_are_axis_1_of_integers_and_what_is_as_long():
    ids, mask, image = torch.ones(2, 7, dtype=torch.int64), torch.ones(2, 7), torch.ones(2, 3, 7)
    assert token_axes((ids, image), {"mask": mask}) == {(0, 1), (2, 1)}
    assert token_axes((image,), {}) == set()


@pytest.mark.parametrize("dynamic_shapes", ["bach", 1, True, Dim.AUTO])
def test_dynamic_shapes_of_another_type_are_an_error_that_says_what_to_give(dynamic_shapes):
    with pytest.raises(CaptureError, match=r"dynamic_shapes is .*; give 'batch', 'all', None, or what torch\.export"):
        check_dynamic_shapes(dynamic_shapes)


@pytest.mark.parametrize(
    "dynamic_shapes", ["batch", "all", None, {"x": {0: Dim.AUTO}}, ({0: Dim("n")},), [None], ShapesCollection()]
)
def test_dynamic_shapes_that_may_be_given(dynamic_shapes):
    check_dynamic_shapes(dynamic_shapes)


class TooLarge(nn.Module):
    """Has memory for one sample only."""

    def __init__(self, error):
        super().__init__()
        self.linear, self.error = nn.Linear(4, 4), error

    def forward(self, x):
        if not torch.compiler.is_exporting() and x.shape[0] > 1:
            raise self.error
        return self.linear(x)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=repr)
def test_running_out_of_memory_is_no_answer_of_the_model(error):
    model, x = TooLarge(error).eval(), torch.randn(1, 4)
    with pytest.raises(type(error)):
        with_batch_of_two(model, (x,), {})
    with pytest.raises(type(error)):
        qtk.prepare_model(model, x)


def test_shapes_of_a_registered_class_are_those_of_its_tensors_in_a_list():
    cache = Cache()
    cache.keys, cache.values = [torch.ones(2, 3)], [torch.ones(2, 4)]
    tree = {"x": torch.ones(2), "cache": cache, "pair": (torch.ones(1), None)}
    shapes = shapes_like(tree, lambda leaf: {0: leaf.shape[-1]} if isinstance(leaf, torch.Tensor) else None)
    assert shapes == {"x": {0: 2}, "cache": [{0: 3}, {0: 4}], "pair": ({0: 1}, None)}


class RunningMean(nn.Module):
    """Takes a running mean away, which it keeps of one stream, under a name that each call rebinds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(4, 6, 3)
        self.register_buffer("mean", torch.zeros(1, 4, 1))

    def forward(self, x):
        self.mean = self.mean + 0.1 * (x.mean(2, keepdim=True) - self.mean)
        return self.layer(x - self.mean)


def test_a_model_with_a_buffer_of_one_stream_is_a_graph_of_one_sample():
    model, x = RunningMean().eval(), torch.randn(1, 4, 8)
    args, _ = with_batch_of_two(model, (x,), {})
    assert args[0] is x
    assert torch.equal(model.mean, torch.zeros(1, 4, 1))
    prepared = qtk.prepare_model(model, x)
    assert prepared.report.rung == "export"
    other = copy.deepcopy(model)
    for _ in range(3):
        x = torch.randn(1, 4, 8)
        torch.testing.assert_close(prepared(x), other(x), rtol=0, atol=0)


def test_the_trial_with_two_samples_leaves_buffers_as_they_were():
    model = nn.Sequential(nn.BatchNorm1d(4)).train()
    args, _ = with_batch_of_two(model, (torch.randn(1, 4, 8),), {})
    assert len(args[0]) == 2
    assert torch.equal(model[0].running_mean, torch.zeros(4))
    assert int(model[0].num_batches_tracked) == 0
