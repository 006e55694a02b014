import logging

import pytest
import torch
from torch import fx, nn

import qtk
from qtk.calls.inputs import is_free, split_inputs
from qtk.capture.torch_export import capture
from qtk.errors import CaptureError


class OnlyTraceable(nn.Module):
    """Export follows the branch on data and stops; a symbolic trace does not see it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, mask=None, times=2):
        if not isinstance(x, fx.Proxy) and bool(x.isnan().any()):
            raise ValueError("not a number")
        y = self.fc(x) * times
        return y if mask is None else y * mask


class Branch(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


def sizes(found):
    return {name: tuple(value.shape) for name, value in _placeholders(found) if isinstance(value, torch.Tensor)}


def _placeholders(found):
    user = set(found.program.graph_signature.user_inputs)
    for node in found.program.graph.find_nodes(op="placeholder"):
        if node.name in user:
            yield node.name, node.meta["val"]


@pytest.mark.medium
def test_export_is_the_first_rung_and_the_batch_is_free():
    found = capture(nn.Linear(4, 2).eval(), (torch.ones(3, 4),), {}, "batch")
    assert (found.rung, found.dynamic, found.reasons) == ("export", True, ())
    assert isinstance(sizes(found)["input"][0], torch.SymInt)


def test_no_dynamic_shapes_fixes_everything():
    found = capture(nn.Linear(4, 2).eval(), (torch.ones(3, 4),), {}, None)
    assert not found.dynamic
    assert sizes(found) == {"input": (3, 4)}


def test_given_dynamic_shapes_are_taken():
    auto = torch.export.Dim.AUTO
    found = capture(nn.Conv2d(1, 1, 3).eval(), (torch.ones(2, 1, 8, 8),), {}, ({2: auto, 3: auto},))
    batch, _, height, _ = sizes(found)["input"]
    assert batch == 2
    assert isinstance(height, torch.SymInt)


def test_given_dynamic_shapes_that_the_model_cannot_have_are_an_error():
    with pytest.raises(CaptureError, match=r"the given dynamic_shapes.*(?s:.)*constant \(4\)"):
        capture(nn.Linear(4, 2).eval(), (torch.ones(3, 4),), {}, ({1: torch.export.Dim("n")},))


def test_a_batch_of_one_is_doubled_so_that_it_can_vary():
    found = capture(nn.Linear(4, 2).eval(), (torch.ones(1, 4),), {}, "batch")
    assert found.dynamic
    assert found.args[0].shape == (2, 4)


def test_a_single_row_beside_a_table_is_doubled_too():
    class Lookup(nn.Module):
        def forward(self, x, table):
            return x @ table

    found = capture(Lookup(), (torch.ones(1, 4), torch.ones(4, 3)), {}, "batch")
    assert [tuple(arg.shape) for arg in found.args] == [(2, 4), (4, 3)]
    assert isinstance(sizes(found)["x"][0], torch.SymInt)


def test_a_batch_of_one_that_cannot_be_doubled_stays():
    class One(nn.Module):
        def forward(self, x):
            return x.reshape(4)

    found = capture(One(), (torch.ones(1, 4),), {}, "batch")
    assert not found.dynamic
    assert found.args[0].shape == (1, 4)


def test_a_batch_size_in_the_code_is_reported():
    class Fixed(nn.Module):
        def forward(self, x):
            return x.reshape(3, 2, 2)

    found = capture(Fixed(), (torch.ones(3, 4),), {}, "batch")
    assert not found.dynamic
    assert found.reasons == ("export: the code of the model fixes axis 0 of input x to 3",)


def test_arguments_that_python_packs_get_a_free_batch():
    class Star(nn.Module):
        def forward(self, *xs, **named):
            return sum(xs) + sum(named.values())

    two = (torch.ones(2, 3), torch.ones(2, 3))
    assert capture(Star(), two, {}, "batch").dynamic
    named = capture(Star(), (), {"a": two[0], "b": two[1]}, "batch")
    assert named.dynamic or "Must provide a tree_name" in named.reasons[0]  # torch 2.11 knows no shapes of **named


def test_the_second_rung_is_a_symbolic_trace(capfd):
    found = capture(OnlyTraceable().eval(), (torch.ones(2, 4),), {}, "batch")
    assert (found.rung, found.dynamic) == ("fx + export", True)
    assert [reason.partition(":")[0] for reason in found.reasons] == ["export, dynamic batch", "export, static shapes"]
    assert "data-dependent" in found.reasons[0]
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == 0


@pytest.mark.skipif(not hasattr(fx.config, "do_not_emit_stack_traces"), reason="torch < 2.14 has no such setting")
@pytest.mark.parametrize("setting", [False, True])
def test_no_node_holds_where_in_the_code_it_was_made(monkeypatch, setting):
    monkeypatch.setattr(fx.config, "do_not_emit_stack_traces", setting)
    program = capture(nn.Linear(4, 3).eval(), (torch.randn(2, 4),), {}, "batch").program
    assert not [node for node in program.graph.nodes if "stack_trace" in node.meta]
    assert fx.config.do_not_emit_stack_traces is setting


def test_a_symbolic_trace_follows_the_defaults():
    model, x = OnlyTraceable().eval(), torch.randn(2, 4)
    found = capture(model, (torch.ones(2, 4),), {}, "batch")
    assert found.rung == "fx + export"
    assert torch.equal(found.program.module()(x), model.fc(x) * 2)


def test_a_symbolic_trace_takes_keyword_arguments():
    model, x, mask = OnlyTraceable().eval(), torch.randn(2, 4), torch.tensor([[0.0], [1.0]])
    found = capture(model, (), {"x": torch.ones(2, 4), "mask": torch.ones(2, 1), "times": 3}, "batch")
    assert found.rung == "fx + export"
    assert torch.equal(found.program.module()(x=x, mask=mask, times=3), model.fc(x) * 3 * mask)


def test_when_no_rung_holds_every_reason_is_given():
    with pytest.raises(CaptureError) as caught:
        capture(Branch(), (torch.ones(2, 4),), {}, "batch")
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0].strip() for line in lines] == [
        "export, dynamic batch", "export, static shapes", "fx + export",
    ]
    assert "control flow" in lines[-1]


def test_split_inputs():
    x = torch.ones(1)
    assert split_inputs(x) == ((x,), {})
    assert split_inputs((x, 2)) == ((x, 2), {})
    assert split_inputs([x, 2]) == ((x, 2), {})
    assert split_inputs({"x": x}) == ((), {"x": x})
    with pytest.raises(CaptureError, match="must be a tensor, a tuple or a dict, got int"):
        split_inputs(3)


def test_one_tensor_passed_twice_is_two_inputs():
    class Difference(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, pair, *, extra):
            return self.one(x) - self.other(pair[0]) + pair[1] * extra

    model, x = Difference().eval(), torch.randn(3, 4)
    prepared = qtk.prepare_model(model, {"x": x, "pair": [x, x], "extra": x})
    x, a, b, extra = torch.randn(4, 5, 4)
    assert torch.equal(prepared(x=x, pair=[a, b], extra=extra), model(x, [a, b], extra=extra))


class Held(nn.Module):
    """A linear layer beside a tensor that no graph can hold: a buffer, or the input."""

    def __init__(self, table=None):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("table", table)

    def forward(self, x):
        if self.table is None:
            return self.fc(x.dequantize())
        return self.fc(x) @ self.table.dequantize() if self.table.is_quantized else self.table @ self.fc(x)


QUINT8 = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 128, torch.quint8)


@pytest.mark.medium
@pytest.mark.parametrize(("net", "x", "named"), [
    (Held(), QUINT8, "input 0 is quint8, and torch cannot trace quantized tensors; give it dequantized"),
    (Held(QUINT8), torch.randn(4, 4), "buffer table is quint8"),
    (Held(torch.eye(4).to_sparse()), torch.randn(4, 4), "aten.mm.default"),
])
def test_tensors_that_cannot_be_traced_are_named_and_the_layers_beside_them_quantized(net, x, named):
    sim = qtk.QuantSim(net, x)
    assert "fc.weight" in sim.quantizers
    assert sim.model.report.parts[0].rung == "python"
    assert named in sim.model.report.parts[0].reason


class Positioned(nn.Module):
    """Positions of all samples or of each, which are made as many as the samples."""

    def forward(self, x, positions):
        return x * positions[:, None].expand(x.shape[0], -1, -1).cos()


class Apart(nn.Module):
    """A sample of one batch for all of another."""

    def forward(self, x, image):
        return x.sum(1) * image.mean()


@torch.no_grad()
def test_a_batch_of_one_that_is_given_to_all_samples_stays_one():
    model = qtk.prepare_model(Positioned().eval(), (torch.randn(3, 2, 5), torch.randn(1, 5)), dynamic_shapes="all")
    assert [shape[0] for shape in free_sizes(model)] == [True, False]
    x, positions = torch.randn(4, 2, 7), torch.randn(1, 7)
    assert torch.equal(model(x, positions), Positioned()(x, positions))
    with pytest.raises(CaptureError, match=r"input positions has shape \(4, 7\), the model was captured for \(1, any"):
        model(x, torch.randn(4, 7))


@torch.no_grad()
def test_a_batch_of_one_of_its_own_is_free():
    model = qtk.prepare_model(Apart().eval(), (torch.randn(3, 5), torch.randn(1, 4)), dynamic_shapes="all")
    assert [shape[0] for shape in free_sizes(model)] == [True, True]
    x, image = torch.randn(4, 5), torch.randn(2, 4)
    assert torch.allclose(model(x, image), Apart()(x, image))


def free_sizes(model):
    return [tuple(map(is_free, node.meta["val"].shape)) for node in model.graph.find_nodes(op="placeholder")]
