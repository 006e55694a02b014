import copy

import pytest
import torch
from torch import nn

from qtk.calls.signature import call_kind, signature_of
from qtk.capture.variants import _reasons, add_variant
from qtk.errors import CaptureError
from qtk.graph.graphs import graphs, with_nested
from qtk.graph.sites import value_site
from qtk.nn.attention import Attention
from qtk.operators.targets import called_module
from qtk.workflow.prepare import prepare_model

MATRIX, CUBE = torch.randn(3, 8), torch.randn(2, 3, 8)


def kind(*args):
    return call_kind(signature_of(net()), args, {})


def net():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout())


def pair():
    """A module, and the graph of its calls with three axes, which hands those with two on to another."""
    model = net().eval()
    main, other = prepare_model(model, CUBE), prepare_model(model, MATRIX, verify=False)
    add_variant(main, kind(MATRIX), other)
    return model, main, other


@pytest.mark.medium
def test_each_kind_of_call_goes_to_its_graph():
    model, main, other = pair()
    ran = []
    other.register_forward_pre_hook(lambda *_: ran.append("other"))
    assert torch.equal(main(CUBE), model(CUBE))
    assert ran == []
    assert torch.equal(main(MATRIX), model(MATRIX))
    assert ran == ["other"]
    with pytest.raises(CaptureError, match="input input has shape"):
        main(MATRIX[0])


@pytest.mark.medium
def test_they_have_one_set_of_members_and_the_keys_of_the_module():
    model, main, other = pair()
    assert list(main.state_dict()) == list(model.state_dict())
    assert main._modules is other._modules
    assert graphs(main) == {"": main, "@1": other}
    assert with_nested(main) == [main]


@pytest.mark.medium
def test_a_copy_has_members_of_its_own_shared_again():
    _, main, _ = pair()
    twin = copy.deepcopy(main)
    other = twin.variants[kind(MATRIX)]
    assert twin._modules is other._modules is not main._modules
    with torch.no_grad():
        twin.get_parameter("0.weight").zero_()
        twin.get_parameter("0.bias").zero_()
    assert not torch.equal(twin(MATRIX), main(MATRIX))
    assert torch.equal(twin(MATRIX), twin(MATRIX * 2))


def test_all_follow_to_another_dtype():
    class Ramp(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.arange(8, dtype=torch.float32)

    model = Ramp(8, 8)
    main = prepare_model(model, CUBE)
    add_variant(main, kind(MATRIX), prepare_model(model, MATRIX))
    main = copy.deepcopy(main).to(torch.bfloat16)
    assert main(MATRIX.bfloat16()).dtype is main(CUBE.bfloat16()).dtype is torch.bfloat16


class Constant(nn.Module):
    """Adds a constant that the number of axes decides, and one that it does not, in an order that it decides too."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        if x.ndim == 2:
            x = x * torch.tensor([2.0] * 8)
        return self.fc(x) + torch.tensor([1.0] * 8)


@pytest.mark.medium
def test_constants_that_differ_have_names_of_their_own_and_equal_ones_are_one():
    model = Constant()
    main = prepare_model(model, CUBE, variants=[MATRIX])
    assert torch.equal(main(CUBE), model(CUBE))
    assert torch.equal(main(MATRIX), model(MATRIX))
    assert sorted(float(buffer[0]) for buffer in main.buffers()) == [1.0, 2.0]


class Twin(nn.Module):
    """A tensor that is no member, read by one kind of call alone, and a member of like name and value."""

    def __init__(self, persistent):
        super().__init__()
        self.fc, self.mask = nn.Linear(8, 8), torch.ones(8)
        self.register_buffer("mask_2", torch.ones(8), persistent=persistent)

    def forward(self, x):
        return self.fc(x) * (self.mask_2 if x.ndim == 3 else self.mask)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_buffer_that_changes_is_no_constant_of_another_graph(persistent):
    model = Twin(persistent)
    main = copy.deepcopy(prepare_model(model, CUBE, variants=[MATRIX]))
    before = main(MATRIX)
    with torch.no_grad():
        main.get_buffer("mask_2").fill_(3.0)
    assert torch.equal(main(MATRIX), before)
    torch.testing.assert_close(main(CUBE), 3 * model(CUBE))
    assert len(list(main.buffers())) == 2


class Heads(nn.Module):
    """Attention with a mask or none; a residual sum behind the ops that prepare the mask."""

    def __init__(self, fused=True):
        super().__init__()
        self.q, self.k, self.v, self.fused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), fused
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask=None):
        bias = None
        if mask is not None:
            bias = ((mask + 0.0) - 1.0)[:, None, :] * 1e4 + torch.zeros(3, 1)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v, bias)
        else:
            scores = q @ k.transpose(-2, -1)
            y = (scores if bias is None else scores + bias).softmax(-1) @ v
        return x + self.drop(y)


MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_the_ops_of_both_graphs_are_the_same_sites_whatever_stands_before_them(fused, first):
    """``add`` is the residual sum without a mask, and one in front of it with a mask."""
    model, inputs = Heads(fused).eval(), [(CUBE,), (CUBE, MASK)]
    alone = prepare_model(model, inputs[first])
    main = prepare_model(model, inputs[first], variants=[inputs[1 - first]])
    (other,) = main.variants.values()
    assert [value_site(node) for node in main.graph.nodes if node.op != "get_attr"] == [
        value_site(node) for node in alone.graph.nodes if node.op != "get_attr"]
    residuals = [graph.graph.output_node().all_input_nodes[0] for graph in (main, other)]
    assert value_site(residuals[0]) == value_site(residuals[1])
    masked = (main, other)[1 - first]
    everything = [value_site(node) for graph in [masked, *(g for p, g in graphs(main).items() if ".core" in p)]
                  for node in graph.graph.nodes if node.op in ("call_function", "call_module")]
    assert len(set(everything)) >= len(everything) - 8  # the two cores share some
    for call in inputs:
        torch.testing.assert_close(main(*call), model(*call))


@pytest.mark.medium
def test_names_are_of_one_op_each():
    model = Heads(False).eval()
    main = prepare_model(model, CUBE, variants=[(CUBE, MASK)])
    (other,) = main.variants.values()
    names = [value_site(node) for node in other.graph.nodes if node.op == "call_function"]
    assert len(set(names)) == len(names)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("variant", "equal"), [((MATRIX,), True), ((CUBE, MASK), False)])
def test_equal_composites_are_one_and_others_share_their_sites(variant, equal):
    main = prepare_model(Heads().eval(), CUBE, variants=[variant])
    (other,) = main.variants.values()
    (mine,), (its,) = called(main), called(other)
    assert (mine is its) is equal
    inside = [{value_site(node).name for node in each.core.graph.nodes if node.op == "call_function"}
              for each in (mine, its)]
    assert inside[0] <= inside[1]
    assert len(graphs(main)) == (3 if equal else 4)
    mine.p = 0.4
    assert its.p == 0.4


def called(graph):
    return [module for node in graph.graph.nodes if isinstance(module := called_module(node), Attention)]


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.norm, self.aux = Heads(), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))

    def forward(self, x, labels=None, aux=False):
        y = self.norm(self.heads(x)).mean(1)
        if aux:
            y = self.aux(y)
        return y if labels is None else nn.functional.cross_entropy(y, labels)


@pytest.mark.medium
def test_modules_of_the_original_act_wherever_a_graph_calls_them():
    model = Labelled().eval()
    main = prepare_model(model, CUBE, variants=[{"x": CUBE, "aux": True}, {"x": CUBE, "labels": torch.tensor([0, 1])}])
    assert type(main.norm) is nn.BatchNorm1d
    assert type(main.aux.get_submodule("1")) is nn.Dropout
    main.train()
    main.heads.drop.p = 0.0
    for module in main.modules():
        if isinstance(module, Attention):
            module.p = 0.0
    before = main.norm.running_mean.clone()
    torch.testing.assert_close(main(CUBE, aux=True).count_nonzero() < 16, torch.tensor(True))
    assert not torch.equal(main.norm.running_mean, before)
    main.aux.get_submodule("1").p = 0.0
    assert main(CUBE, aux=True).count_nonzero() == 16
    assert list(main.state_dict()) == list(model.state_dict())


@pytest.mark.medium
def test_a_call_is_told_by_what_it_gives_not_by_how_it_is_written():
    model, labels = Labelled().eval(), torch.tensor([0, 1])
    main = prepare_model(model, CUBE, variants=[{"x": CUBE, "labels": labels}])
    loss = model(CUBE, labels)
    for written in (main(CUBE, labels), main(CUBE, labels=labels), main(labels=labels, x=CUBE, aux=False)):
        assert torch.equal(written, loss)
    for written in (main(CUBE), main(CUBE, None), main(x=CUBE, labels=None)):
        assert torch.equal(written, model(CUBE))
    with pytest.raises(CaptureError, match=r"no graph serves(.|\n)*input aux(.|\n)*add these inputs to the variants"):
        main(CUBE, aux=True)


class Frames(nn.Module):
    """Computes one frame otherwise than several."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x, bias=None):
        x = self.proj(x)
        x = torch.tanh(x) if x.shape[1] == 1 else torch.cumsum(x, 1)
        return x if bias is None else x + bias


ONE, SEVERAL = torch.randn(2, 1, 8), torch.randn(2, 5, 8)


@pytest.mark.medium
@pytest.mark.parametrize("calls", [(SEVERAL, ONE), (ONE, SEVERAL)])
def test_a_call_of_one_frame_has_a_graph_beside_calls_of_any_number(calls):
    model = Frames().eval()
    main = prepare_model(model, calls[0], variants=[(calls[1],), {"x": SEVERAL, "bias": SEVERAL}], dynamic_shapes="all")
    of_one = [graph for graph in (main, *main.variants.values()) if any(
        node.target is torch.ops.aten.tanh.default for node in graph.graph.nodes)]
    assert len(of_one) == 1
    assert {str(value_site(node)) for graph in (main, *main.variants.values()) for node in graph.graph.nodes
            if "linear" in node.name} == {"proj:out"}
    for each in (main, copy.deepcopy(main)):
        for _ in range(3):  # the first call is checked, the second bound, the third known
            for frames in (4, 1, 9):
                x = torch.randn(3, frames, 8)
                assert torch.equal(each(x), model(x))
                assert torch.equal(each(x, x) if frames > 1 else each(x), model(x, x) if frames > 1 else model(x))


class Few(Frames):
    """The code of one frame is for at most three rows."""

    def forward(self, x, bias=None):
        x = self.proj(x)
        return torch.tanh(x) if x.shape[1] == 1 and x.shape[0] <= 3 else torch.cumsum(x, 1)


@pytest.mark.medium
def test_the_report_says_of_which_call_a_limit_is():
    main = prepare_model(Frames().eval(), SEVERAL, variants=[(ONE,)], dynamic_shapes="all")
    limit, length = main.report.reasons
    assert limit == "export: the graph serves sizes where x.shape[1] > 1 (example_inputs)"
    assert length.startswith("export: axis 1 of input x has length 1")
    assert length.endswith(" (variants[0])")
    assert _reasons([("a", "b"), ("b",), ("c", "b")]) == ("a (example_inputs)", "b", "c (variants[1])")


@pytest.mark.medium
def test_sizes_that_a_graph_refuses_go_to_another_whatever_came_before():
    model = Few().eval()
    main = prepare_model(model, torch.randn(6, 5, 8), variants=[(torch.randn(2, 1, 8),)], dynamic_shapes="all")
    for order in ((2, 8), (8, 2)):
        each = copy.deepcopy(main)
        for rows in (*order, *order, *order):
            x = torch.randn(rows, 1, 8)
            assert torch.equal(each(x), model(x))


@pytest.mark.medium
@pytest.mark.parametrize("calls", [((SEVERAL, None), (ONE,)), ((ONE,), (SEVERAL, None)), ((ONE, None), (SEVERAL,))])
def test_a_default_that_one_of_two_calls_passes_makes_no_difference(calls):
    model = Frames().eval()
    main = prepare_model(model, calls[0], variants=[calls[1]], dynamic_shapes="all")
    for frames in (1, 4, 1):
        x = torch.randn(2, frames, 8)
        for _ in range(2):
            assert torch.equal(main(x), model(x))
            assert torch.equal(main(x, None), model(x))


class Cached(nn.Module):
    """One token by other code than several, behind any number of kept ones."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x, kept):
        x = self.proj(x)
        x = torch.tanh(x) if x.shape[1] == 1 else torch.cumsum(x, 1)
        return x + kept.sum(1, keepdim=True), torch.cat([kept, x], 1)


@pytest.mark.medium
def test_the_call_of_one_token_is_told_by_the_tokens_not_by_the_cache():
    model = Cached().eval()
    several, one = (torch.randn(2, 5, 8), torch.randn(2, 1, 8)), (torch.randn(2, 1, 8), torch.randn(2, 6, 8))
    main = prepare_model(model, several, variants=[one], dynamic_shapes="all")
    for tokens, kept in ((5, 1), (4, 7), (1, 6), (1, 3), (2, 2)):
        call = torch.randn(3, tokens, 8), torch.randn(3, kept, 8)
        for got, wanted in zip(main(*call), model(*call), strict=True):
            assert torch.equal(got, wanted)


class Long(Frames):
    def forward(self, x, bias=None):
        x = self.proj(x)
        return torch.tanh(x) if x.shape[1] > 8 else torch.cumsum(x, 1)


@pytest.mark.medium
@pytest.mark.parametrize("frames", [5, 1])
def test_sizes_that_one_graph_does_not_serve_have_a_graph_of_their_own(frames):
    model = Long().eval()
    main = prepare_model(model, torch.randn(2, 10, 8), variants=[(torch.randn(2, frames, 8),)], dynamic_shapes="all")
    for length in (12, 3, 5, 1, 9):
        x = torch.randn(2, length, 8)
        assert torch.equal(main(x), model(x))


@pytest.mark.medium
def test_graphs_that_differ_in_sizes_are_chosen_in_compiled_code():
    main = prepare_model(Frames().eval(), SEVERAL, variants=[(ONE,)], dynamic_shapes="all")
    compiled = torch.compile(main, backend="eager", fullgraph=True)
    for x in (ONE, SEVERAL, torch.randn(3, 9, 8), torch.randn(4, 1, 8)):
        assert torch.equal(compiled(x), main(x))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no graph is for these shapes"):
        compiled(torch.randn(2, 5, 4))


@pytest.mark.slow
def test_where_a_limit_decides_between_graphs_one_is_chosen_outside_of_compiled_code():
    main = prepare_model(Few().eval(), torch.randn(6, 5, 8), variants=[(torch.randn(2, 1, 8),)], dynamic_shapes="all")
    several, one = torch.randn(4, 6, 8), torch.randn(3, 1, 8)
    compiled = torch.compile(main, backend="eager", fullgraph=True)
    assert torch.equal(compiled(several), main(several))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"2 graphs are for these shapes.*without fullgraph=True"):
        compiled(one)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(main, backend="eager")(one), main(one))


@pytest.mark.medium
def test_calls_of_other_fixed_sizes_have_a_graph_each():
    model = Frames().eval()
    main = prepare_model(model, SEVERAL, variants=[(ONE,), (torch.randn(2, 7, 8),)], dynamic_shapes=None)
    for frames in (1, 5, 7, 5):
        x = torch.randn(2, frames, 8)
        assert torch.equal(main(x), model(x))
    with pytest.raises(CaptureError, match="no graph serves"):
        main(torch.randn(2, 6, 8))


@pytest.mark.medium
def test_what_cannot_be_variants_is_refused():
    model, labels = Labelled().eval(), torch.tensor([0, 1])
    with pytest.raises(CaptureError, match=r"variants\[1\].* is a call of the same kind as variants\[0\]"):
        prepare_model(model, CUBE, variants=[(CUBE, labels), {"labels": labels, "x": CUBE}])
    with pytest.raises(CaptureError, match=r"one graph serves both, leave it out"):
        prepare_model(Frames().eval(), SEVERAL, variants=[(torch.randn(2, 7, 8),)], dynamic_shapes="all")
    with pytest.raises(CaptureError, match="explicit dynamic_shapes describe one graph"):
        prepare_model(model, CUBE, variants=[(CUBE, labels)], dynamic_shapes={"x": None, "labels": None})
    with pytest.raises(CaptureError, match="variants are captured with example_inputs"):
        prepare_model(nn.Linear(2, 2), variants=[MATRIX])
    with pytest.raises(CaptureError, match="give variants when preparing it first"):
        prepare_model(prepare_model(model, CUBE), CUBE, variants=[(CUBE, labels)])
