"""What holds for every model, whatever it is made of."""

import copy
import operator

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import qtk
from qtk.calls.inputs import split_inputs
from qtk.config.load import load_config
from qtk.core.granularity import PerBlock, PerChannel
from qtk.errors import NotCalibratedError
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs, nested_graphs
from qtk.graph.insert import insert, remove
from qtk.graph.sites import is_float, value_site
from qtk.operators.lookup import row_of
from qtk.planning.planner import plan
from qtk.quantizers.modes import in_mode
from tests.zoo.entry import Entry
from tests.zoo.models import ZOO
from tests.zoo.prepared import LIVE, pair, simulated

pytestmark = pytest.mark.parametrize("name", ZOO)


OTHER = 3
"""A batch size other than the captured one, where the model allows it."""


def other_batch(entry: Entry) -> int:
    return OTHER if entry.dynamic else 2


def equal(a: object, b: object) -> bool:
    left, right = pytree.tree_flatten(a), pytree.tree_flatten(b)
    same = [torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(left[0], right[0], strict=True)]
    return left[1] == right[1] and all(same)


def prepared_once(name: str) -> qtk.PreparedModel:
    """Shared by tests that do not change it."""
    return pair(name)[1]


def plan_of(prepared):
    return plan(prepared, load_config({"version": 1}), weight_bits=8, activation_bits=8,
                scheme="min_max")


def listing(model):
    nodes = [(n.name if n.op == "placeholder" else n.op, str(n.target), str(n.args), str(n.kwargs))
             for graph in graphs(model).values() for n in graph.graph.nodes]
    return nodes, [name for name, _ in model.named_modules()]


@pytest.mark.sample(7)
@pytest.mark.medium
def test_the_plan_is_pure_and_insertion_is_undone_exactly(name):
    prepared = copy.deepcopy(prepared_once(name))
    before, code = listing(prepared), [graph.code for graph in graphs(prepared).values()]
    first = plan_of(prepared)
    assert plan_of(prepared) == first
    assert listing(prepared) == before
    insert(prepared, first)
    assert len(listing(prepared)[0]) > len(before[0])
    remove(prepared)
    assert listing(prepared) == before
    assert [graph.code for graph in graphs(prepared).values()] == code


@pytest.mark.medium
@pytest.mark.sample(4)
def test_bypassed_is_float_and_uncalibrated_is_an_error(name):
    entry = ZOO[name]
    prepared = prepared_once(name)
    sim = qtk.QuantSim(prepared, entry.inputs(), config=LIVE)
    with torch.no_grad():
        with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
            assert equal(entry.run(sim.model, other_batch(entry)), entry.run(prepared, other_batch(entry)))
        with pytest.raises(NotCalibratedError):
            entry.run(sim.model)


@pytest.mark.sample(6)
@pytest.mark.medium
def test_every_float_value_has_a_site_or_a_reason(name):
    prepared = prepared_once(name)
    assert prepared.report.unknown_ops == ()
    decided = plan_of(prepared)
    inside = set().union(*(insides(node) for graph in graphs(prepared).values() for node in graph.graph.nodes))
    for graph in graphs(prepared).values():
        flow = Flow(graph.graph)
        for node in graph.graph.nodes:
            if is_float(node) and node.op != "get_attr" and flow.carried(node) is None and node.users:
                site = value_site(node)
                constant = flow.row(node) is not None and flow.is_constant(node)
                quantized_outside = node.op == "placeholder" and graph in inside
                made_inside = bool(insides(maker(node)))
                excused = constant or quantized_outside or made_inside
                assert site in decided or site in decided.unquantized or excused, site.name


def maker(node):
    return node.args[0] if node.target is operator.getitem else node


def insides(node):
    """The graphs in the module that ``node`` calls."""
    return set(nested_graphs(node).values())


@pytest.mark.medium
@pytest.mark.sample(6)
def test_per_channel_weights_reach_every_weighted_op(name):
    entry = ZOO[name]
    sim = qtk.QuantSim(prepared_once(name), entry.inputs())
    nodes = [(Flow(module.graph), node) for module in graphs(sim.model).values() for node in module.graph.nodes]
    for flow, node in nodes:
        row = row_of(node)
        if row is None or row.weight_axes is None or flow.is_static(node):
            continue
        for port in flow.weight_ports(node):
            # between the parameter and the op sits a quantizer per channel, and per matrix of a stack
            value = port.value
            while not (value.op == "call_module" and "qtk_quantizers" in str(value.target)):
                value = value.all_input_nodes[0]
            spec = node.graph.owning_module.get_submodule(str(value.target)).spec
            of_stack = PerBlock((1, 1, -1))  # [matrix, out, in]
            assert isinstance(spec.granularity, PerChannel) or spec.granularity == of_stack, f"{value.target} of {node}"


@pytest.mark.medium
@pytest.mark.sample(5)
def test_the_simulation_is_close_to_float_at_16_bits(name):
    entry = ZOO[name]
    sim = simulated(name, weight_bits=16, activation_bits=16)
    with torch.no_grad():
        expected = pytree.tree_leaves(entry.run(entry.model()))
        found = pytree.tree_leaves(entry.run(sim.model))
    for a, b in zip(expected, found, strict=True):
        if isinstance(a, Tensor) and a.is_floating_point():
            noise, signal = float((a - b).double().square().sum()), float(a.double().square().sum())
            assert noise < 1e-5 * signal  # 50 dB; 16 bits leave about 80


@pytest.mark.sample(20)
@pytest.mark.medium
def test_codes_are_integers_in_range_at_every_site(name):
    entry = ZOO[name]
    sim = simulated(name)
    values: dict[str, Tensor] = {}
    for site, quantizer in sim.quantizers.items():
        quantizer.register_forward_hook(lambda module, args, out, site=site: values.__setitem__(site, out))
    with torch.no_grad():
        entry.run(sim.model, other_batch(entry))
    for site, encoding in sim.encodings().items():
        spec, scale, zero = encoding.spec, encoding.scale.double(), encoding.zero_point
        channels = spec.granularity.block_size(values[site].ndim)
        shape = [values[site].shape[axis] if size == 1 else 1 for axis, size in enumerate(channels)] or [1]
        codes = values[site].double() / scale.reshape(shape)
        codes = codes + (0 if zero is None else zero.double().reshape(shape))
        assert float((codes - codes.round()).abs().max()) < 1e-2
        assert float(codes.min()) > spec.qmin - 0.5
        assert float(codes.max()) < spec.qmax + 0.5


@pytest.mark.sample(3)
@pytest.mark.medium
def test_copies_states_and_files_carry_the_whole_simulation(name, tmp_path):
    entry = ZOO[name]
    sim = simulated(name, weight_bits=4)
    with torch.no_grad():
        expected = entry.run(sim.model)
        assert equal(entry.run(copy.deepcopy(sim.model)), expected)
        sim.save(tmp_path / "sim")
        loaded = qtk.QuantSim.load(tmp_path / "sim", prepared_once(name), entry.inputs())
        assert equal(entry.run(loaded.model), expected)


@pytest.mark.sample(1)
@pytest.mark.medium
def test_the_simulation_exports_and_gives_gradients_to_every_weight(name):
    entry = ZOO[name]
    sim = simulated(name, config=LIVE)
    args, kwargs = split_inputs(entry.inputs())
    program = torch.export.export(sim.model, args, kwargs, strict=False)
    with torch.no_grad():
        assert equal(program.module()(*args, **kwargs), entry.run(sim.model))
    reached = []
    for model in (prepared_once(name), sim.model):
        outputs = pytree.tree_leaves(entry.run(model))
        try:
            sum(t.sum() for t in outputs if isinstance(t, Tensor) and t.requires_grad).backward()
        except RuntimeError as error:
            if model is not sim.model and "not implemented" in str(error):
                pytest.skip(f"the float model has no gradient: {error}")
            raise
        reached.append({key for key, parameter in model.named_parameters() if parameter.grad is not None})
    assert reached[0] <= reached[1]
