"""What the draft of a plan knows of a value: who reads it, whether it counts, and what stays in float for that."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import qtk
from qtk.config.load import load_config
from qtk.config.tensor_setting import TensorSetting
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerTensor
from qtk.core.plan import SitePlan
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.sites import OWNER, edge_site, exclusion, label
from qtk.planning.decision import Decision
from qtk.planning.draft import Draft, agrees, is_empty
from qtk.planning.rules import Rules
from qtk.quantizers.modes import in_mode
from qtk.workflow.prepare import prepare_model
from tests.planning.branching_net import Net, X, reasons, sim, sites
from tests.planning.plans import BARE, by_name, plan_of
from tests.zoo.models import ZOO


def test_a_value_that_an_excluded_module_alone_reads_stays_in_float():
    made = sim(lambda net, y: net.left(y))
    assert sites(made) == {"x:input", "stem.weight", "stem:out"}
    assert reasons(made)["relu:out"] == "read by left, excluded by exclude: left"
    assert reasons(made)["left.weight"] == "excluded by exclude: left"
    assert reasons(made)["left:out"] == "excluded by exclude: left"


@pytest.mark.medium
def test_other_readers_of_the_value_get_it_quantized_on_their_edges_in_one_encoding():
    made = sim(lambda net, y: (net.left(y), net.right(y), net.third(y)))
    assert {"right:in[0]", "third:in[0]"} <= sites(made)
    assert "relu:out" not in sites(made)
    assert made.quantizers["right:in[0]"] is made.quantizers["third:in[0]"]
    plain = sim(lambda net, y: (net.left(y), net.right(y), net.third(y)), exclude=())
    assert made.encodings()["right:in[0]"].spec == plain.encodings()["relu:out"].spec


def test_what_the_excluded_module_computes_is_float_to_the_bit():
    made = sim(lambda net, y: (net.left(y), net.right(y)))
    before = [made.quantizers[name] for name in ("x:input", "stem.weight", "stem:out") if name in made.quantizers]
    state = made.model.state_dict()
    value = F.relu(F.linear(X, state["stem.weight"], state["stem.bias"]))
    with in_mode(before, qtk.Mode.BYPASS):
        left, right = made.model(X)
    assert torch.equal(left, F.linear(value, state["left.weight"], state["left.bias"]))
    assert not torch.equal(right, F.linear(value, state["right.weight"], state["right.bias"]))


def test_a_model_input_that_an_excluded_module_reads_too():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.left(x) + self.right(x)

    made = qtk.QuantSim(Two().eval(), X, config={**BARE, "exclude": ["left"]})
    assert "x:input" not in made.quantizers
    assert "right:in[0]" in made.quantizers
    assert reasons(made)["x:input"] == "read by left, excluded by exclude: left"


def test_a_merge_gets_the_value_on_its_edge():
    rule = {"match": {"op": "concat"}, "output": {"bits": 8}}
    made = sim(lambda net, y: (net.left(y), torch.cat([y, net.right(y)], 1)), rules=[rule])
    edge = next(name for name in sites(made) if name.startswith("concat:in[0]"))
    assert made.quantizers[edge] is made.quantizers["concat:out"]


def test_a_weight_that_an_excluded_module_reads_too_is_quantized_on_the_edge_of_the_other():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.embedding(x))

    tokens = torch.arange(6).reshape(2, 3)
    made = qtk.QuantSim(Tied().eval(), tokens, config={**BARE, "exclude": ["embedding"]})
    made.compute_encodings([tokens], progress=False)
    assert "embedding.weight" not in sites(made)
    assert "head:in[1]" in sites(made)
    assert not [name for name in sites(made) if name.startswith("embedding")]


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("name", "module"), [("vit", "blocks.0.attn.proj"), ("lstm", "sentence")])
def test_the_output_of_a_composite_that_an_excluded_module_reads_stays_in_float(name, module):
    entry = ZOO[name]
    made = qtk.QuantSim(entry.model().eval(), entry.inputs(), config={**BARE, "exclude": [module]})
    held = [name for name, reason in reasons(made).items() if reason.startswith(f"read by {module}")]
    assert held
    assert not [name for name in sites(made) if name.startswith(module)]


def quantizers_read_inside(model):
    """The quantizer calls whose value an excluded op reads, directly or through data movement."""
    for graph in graphs(model).values():
        flow = Flow(graph.graph)
        for call in quantizer_nodes(graph):
            yield from (call for port in flow.readers(call) if exclusion(port.user))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", ["residual", "vit", "lstm", "gru", "tied"])
@pytest.mark.parametrize("target", ["default", "dynamic"])
def test_no_excluded_module_reads_a_quantized_value(name, target):
    entry = ZOO[name]
    model = entry.model().eval()
    prepared = qtk.prepare_model(model, entry.inputs(), verify=False)
    owners = {label(node, OWNER) or "" for graph in graphs(prepared).values() for node in graph.graph.nodes}
    paths = [path for path, _ in model.named_modules() if path]
    running = [path for path in paths if any(f"{owner}.".startswith(f"{path}.") for owner in owners)]
    for path in running[:6]:
        made = qtk.QuantSim(prepared, entry.inputs(), config={"version": 1, "extends": target, "exclude": [path]})
        assert list(quantizers_read_inside(made.model)) == [], path
        assert not [name for name in sites(made) if name.startswith((f"{path}.", f"{path}:"))], path
    assert running


class CountsTokens(nn.Module):
    """Tokens per expert, counted as floats, and data that they scale."""

    def forward(self, x, expert):
        counts = torch.histc(expert.float(), 4, 0, 3)
        return torch.tanh(x) / counts.sum(), counts.cumsum(0).to(torch.int32)


def test_counts_and_offsets_have_no_site_and_stay_exact():
    expert = torch.arange(4).repeat_interleave(torch.tensor([582, 576, 460, 430]))
    x = torch.randn(2048, 4)
    sim = qtk.QuantSim(CountsTokens(), (x, expert))
    assert list(sim.quantizers) == ["x:input", "tanh:out", "div:out"]
    reasons = {site.name: reason for site, reason in sim.plan.unquantized.items()}
    counting = ["identity:out", "count:out", "sum:out", "cumsum:out"]
    assert reasons == dict.fromkeys(counting, "counts, indices, offsets or a mask")
    sim.compute_encodings([(x, expert)], progress=False)
    assert sim.model(x, expert)[1].tolist() == [582, 1158, 1618, 2048]


@pytest.mark.medium
def test_images_of_integers_are_quantized_where_a_convolution_reads_them_and_positions_are_not():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.register_buffer("frequency", torch.rand(8))

        def forward(self, image, position):
            angle = position.float()[:, None] * self.frequency
            return self.conv(image.float() / 255), angle.cos()

    decided = plan_of(Both(), (torch.randint(0, 255, (2, 3, 8, 8)), torch.arange(600)))
    assert list(by_name(decided)) == ["div:out", "conv.weight", "conv:out", "cos:out"]


@pytest.mark.medium
def test_spelled_out_gates_have_sites():
    class SqueezeExcite(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.reduce = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            y = self.conv(x)
            return y * torch.sigmoid(self.reduce(y.mean((2, 3), keepdim=True)))

    split, whole = (
        {site.name for site in qtk.QuantSim(SqueezeExcite().eval(), torch.randn(2, 3, 8, 8), config=config).plan}
        for config in ({**BARE, "split_gates": True}, BARE)
    )
    assert split - whole == {"sigmoid:out"}


def draft_of(model, inputs, config=BARE, **options):
    """A draft before any pass, and its nodes by name."""
    graph = prepare_model(model.eval(), inputs).graph
    rules = Rules(load_config(config), weight_bits=8, activation_bits=8)
    return Draft(graph, rules, "min_max", load_config(config).io, **options), {node.name: node for node in graph.nodes}


def plan_for(bits=8, **fields):
    return SitePlan(QuantSpec(dtype(f"int{bits}"), PerTensor(), symmetric=True), "min_max", **fields)


@pytest.mark.parametrize(("shape", "empty"), [
    ((0,), True), ((7, 0, 3), True), ((), False), ((1,), False), ((7,), False),
])
def test_a_value_with_an_axis_of_length_0_is_empty(shape, empty):
    node = fx.Graph().placeholder("x")
    node.meta["val"] = torch.zeros(shape)
    assert is_empty(node) is empty


@pytest.mark.parametrize(("field", "value"), [("scheme", "mse"), ("range", (0.0, 1.0)), ("bounds", (0.0, None))])
def test_a_plan_agrees_with_a_decision_in_all_that_the_decision_says(field, value):
    silent, outspoken = (Decision(TensorSetting(), True, "", origins=origins) for origins in ({"bits": 0}, {field: 0}))
    wanted, other = plan_for(), replace(plan_for(), **{field: value})
    assert agrees(wanted, wanted, outspoken)
    assert agrees(other, wanted, silent)
    assert not agrees(other, wanted, outspoken)
    assert not agrees(plan_for(4), wanted, silent)


def test_the_plan_of_a_tensor_is_at_the_first_key_that_has_one():
    draft, nodes = draft_of(nn.Linear(3, 5), torch.randn(2, 3))
    edge, value = Site("", "linear", "in[0]"), nodes["linear"]
    assert draft.planned((value, edge)) is None
    draft.edges[edge] = plan_for(4)
    assert draft.planned((value, edge)) == plan_for(4)
    draft.values[value] = plan_for()
    assert draft.planned((value, edge)) == plan_for()
    assert draft.planned(()) is None


def test_parameters_stand_beside_the_op_that_reads_them_first_and_edges_before_the_result():
    draft, nodes = draft_of(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), torch.randn(2, 3))
    first, second = (node for node in nodes.values() if node.op == "call_function")
    weights = [node.args[1] for node in (first, second)]
    draft.edges[Site("1", "", "in[0]")] = plan_for()
    for node in (second, first, *weights):
        draft.values[node] = plan_for()
    draft.floats[nodes["input_1"]] = "a reason"
    assert [site.name for site in draft.in_order()] == ["0.weight", "0:out", "1:in[0]", "1.weight", "1:out"]
    assert {site.name: reason for site, reason in draft.left_out().items()} == {"input:input": "a reason"}


def test_a_request_is_recorded_if_a_rule_makes_it():
    draft, nodes = draft_of(nn.Linear(3, 5), torch.randn(2, 3))
    for origins in ({}, {"bits": 1}):
        draft.request("output", Decision(TensorSetting(bits=8), True, "", origins=origins), (nodes["linear"],), None)
    (request,) = draft.requests
    assert request.decision.rules == {1}


@pytest.mark.medium
def test_readers_of_one_value_on_edges_of_one_spec_share_the_first_encoding():
    draft, _ = draft_of(Net(lambda net, y: (net.left(y), net.right(y), net.third(y))), X)
    left, right, third = (Site(name, "", "in[0]") for name in ("left", "right", "third"))
    ports = {edge_site(port): port for node in draft.graph.nodes for port in draft.flow.readers(node)
             if port.user.op != "output"}
    for site, bits in ((left, 8), (right, 4), (third, 8)):
        draft.edges[site] = plan_for(bits)
        draft.share_edge(ports[site], site)
    assert draft.edges[left].leader is draft.edges[right].leader is None
    assert draft.edges[third].leader == left


def test_symmetric_parameters_of_at_most_4_bits_may_clip_where_nothing_names_a_scheme():
    prepared = prepare_model(nn.Linear(4, 3), torch.zeros(1, 4))

    def scheme_of(bits, weight=None, scheme="min_max"):
        rules = [{"match": {"op": ["linear"]}, "weight": weight}] if weight else []
        config = {"version": 1, "defaults": {"weight": {"symmetric": True}}, "rules": rules}
        made = qtk.QuantSim(prepared, torch.zeros(1, 4), scheme=scheme, weight_bits=bits, config=config)
        return {site.name: decided.scheme for site, decided in made.plan.items()}

    assert [scheme_of(bits)["weight"] for bits in (2, 3, 4, 5)] == [*["weight_mse"] * 3, "min_max"]
    assert scheme_of(2)["input:input"] == "min_max"
    assert scheme_of(2, scheme="percentile")["weight"] == "percentile"
    assert scheme_of(2, {"symmetric": False})["weight"] == "min_max"
    assert scheme_of(2, {"scheme": "min_max"})["weight"] == "min_max"
