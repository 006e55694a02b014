"""Rule 14 of the planner: excluded modules compute in float, and read floats."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.errors import CaptureError, ConfigError
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.sites import OWNER, exclusion, label
from qtk.quantizers.modes import in_mode
from tests.planning.plans import BARE
from tests.zoo.models import ZOO

X = torch.randn(4, 8)


class Net(nn.Module):
    """The ReLU's output is read by both branches, the weight of the embedding by two modules."""

    def __init__(self, branches):
        super().__init__()
        self.stem, self.left, self.right, self.third = (nn.Linear(8, 8) for _ in range(4))
        self.branches = branches

    def forward(self, x):
        y = F.relu(self.stem(x))
        return self.branches(self, y)


def sim(branches, exclude=("left",), **settings):
    made = qtk.QuantSim(Net(branches).eval(), X, config={**BARE, "exclude": list(exclude), **settings})
    made.compute_encodings([X], progress=False)
    return made


def sites(made):
    return {site.name for site in made.plan}


def reasons(made):
    return {site.name: reason for site, reason in made.plan.unquantized.items()}


def test_a_value_that_an_excluded_module_alone_reads_stays_in_float():
    made = sim(lambda net, y: net.left(y))
    assert sites(made) == {"x:input", "stem.weight", "stem:out"}
    assert reasons(made)["relu:out"] == "read by left, excluded by exclude: left"
    assert reasons(made)["left.weight"] == "excluded by exclude: left"
    assert reasons(made)["left:out"] == "excluded by exclude: left"


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
    made = sim(lambda net, y: (net.left(y), torch.cat([y, net.right(y)], 1)))
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


def test_modules_to_exclude_is_the_same():
    net, inputs = Net(lambda net, y: (net.left(y), net.right(y))).eval(), X
    by_config = qtk.QuantSim(net, inputs, config={**BARE, "exclude": ["left"]})
    by_argument = qtk.QuantSim(qtk.prepare_model(net, inputs, modules_to_exclude=["left"]), inputs, config=BARE)
    assert by_config.plan.diff(by_argument.plan) == []
    assert list(by_config.plan) == list(by_argument.plan)
    assert reasons(by_argument)["relu:out"] == "read by left, excluded by modules_to_exclude: left"


def test_a_rule_on_what_is_excluded_says_so():
    rule = {"match": {"path": "left"}, "weight": {"bits": 4}}
    with pytest.raises(ConfigError, match="left is excluded by exclude: left"):
        sim(lambda net, y: net.left(y), rules=[rule])


def test_an_excluded_batch_norm_is_not_folded_and_exclusions_survive_saving(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    images = torch.randn(2, 3, 6, 6)
    made = qtk.QuantSim(net, images, config={"version": 1, "extends": "default", "exclude": ["1", "3"]})
    made.compute_encodings([images], progress=False)
    assert reasons(made)["1:out"] == "excluded by exclude: 1"
    assert reasons(made)["2:out"] == "read by 3, excluded by exclude: 3"
    made.save(tmp_path / "saved")
    again = qtk.QuantSim.load(tmp_path / "saved", net, images)
    assert reasons(again) == reasons(made)
    assert torch.equal(again.model(images), made.model(images))


def test_an_exclusion_that_names_nothing_is_an_error():
    with pytest.raises(ConfigError, match="no op runs in a module at path 'lfet'; did you mean 'left'"):
        sim(lambda net, y: net.left(y), exclude=["lfet"])


@pytest.mark.parametrize("target", ["default", "onnxruntime", "dynamic"])
def test_what_is_quantized_on_edges_is_exported_as_it_is_simulated(target, tmp_path):
    config = {"version": 1, "extends": target, "exclude": ["left"]}
    made = qtk.QuantSim(Net(lambda net, y: (net.left(y), net.right(y), net.third(y))).eval(), X, config=config)
    made.compute_encodings([X], progress=False)
    edges = {"right:in[0]", "third:in[0]"} & sites(made)
    assert len(edges) == 2
    made.export(tmp_path / "out")
    assert made.verify_export(tmp_path / "out", [X], turns=0).exact.top1 == 1.0
    report = qtk.apply_seq_mse(made, [X], progress=False)
    assert "left.weight" not in {layer.name for layer in report.layers}


def test_a_branch_that_is_not_reached_may_be_excluded_by_the_config():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.plus, self.minus = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return self.plus(x) if float(x.sum()) > 0 else self.minus(x)

    x = torch.ones(2, 8)
    with pytest.raises(CaptureError, match=r"(?s)do not reach these.*minus .*exclude: .*in the config"):
        qtk.QuantSim(Branches(), x)
    sim = qtk.QuantSim(Branches(), x, config={"version": 1, "extends": "default", "exclude": ["minus"]})
    assert "plus.weight" in sim.quantizers


class Experts(nn.Module):
    """Only expert 0 and, for a negative sum, ``branch`` run."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.branch, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 4)

    def forward(self, x):
        x = self.experts[0](x) if float(x.sum()) > 0 else self.branch(self.experts[1](x))
        return self.head(x)


@pytest.mark.parametrize("exclude", [["experts", "branch"], ["expert*", "branc?"]])
def test_excluding_a_module_excludes_the_modules_in_it_that_the_example_inputs_do_not_reach(exclude):
    made = qtk.QuantSim(Experts(), torch.ones(2, 8), config={**BARE, "exclude": exclude})
    assert "head.weight" in made.quantizers
    assert not [name for name in made.quantizers if name.startswith("experts")]


def test_modules_that_are_not_reached_beside_an_excluded_one_are_refused():
    with pytest.raises(CaptureError, match=r"branch\.0 ") as raised:
        qtk.QuantSim(Experts(), torch.ones(2, 8), config={**BARE, "exclude": ["experts"]})
    assert "experts." not in str(raised.value)
