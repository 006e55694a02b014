"""What holds for every model, whatever it is made of (DESIGN §7)."""

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import qtk
from qtk.config.load import load_config
from qtk.core.granularity import PerChannel
from qtk.errors import NotCalibratedError
from qtk.graph.flow import Flow
from qtk.graph.insert import insert, remove
from qtk.graph.op_table import row_of
from qtk.graph.planner import plan
from qtk.graph.sites import is_float, value_site
from qtk.quantizers.modes import in_mode
from tests.zoo.models import ZOO, Case

pytestmark = pytest.mark.parametrize("name", ZOO)


def run(model: nn.Module, inputs) -> object:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def equal(a: object, b: object) -> bool:
    left, right = pytree.tree_flatten(a), pytree.tree_flatten(b)
    same = [torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(left[0], right[0], strict=True)]
    return left[1] == right[1] and all(same)


def calibrated(case: Case, **options) -> qtk.QuantSim:
    sim = qtk.QuantSim(prepared_once(case.name), case.example(), **options)
    sim.compute_encodings([case.example(seed) for seed in (1, 2)], progress=False)
    return sim


@functools.cache
def prepared_once(name: str) -> qtk.PreparedModel:
    """Shared by tests that do not change it."""
    return qtk.prepare_model(ZOO[name].model(), ZOO[name].example())


def plan_of(prepared):
    return plan(prepared.graph, load_config({"version": 1}), weight_bits=8, activation_bits=8,
                scheme="min_max")


def listing(model):
    nodes = [(n.name if n.op == "placeholder" else n.op, str(n.target), str(n.args), str(n.kwargs))
             for n in model.graph.nodes]
    return nodes, [name for name, _ in model.named_modules()]


def test_preparing_keeps_function_names_and_gradients(name):
    case = ZOO[name]
    original, inputs = case.model(), case.example()
    twin = copy.deepcopy(original)
    prepared = qtk.prepare_model(original, inputs)
    assert list(prepared.state_dict()) == list(twin.state_dict())
    other = case.example(seed=5, batch=6)
    with torch.no_grad():
        assert equal(run(prepared, other), run(twin, other))  # another batch size than captured
    gradients = []
    for model in (prepared, twin):
        model.zero_grad()
        sum(t.float().sum() for t in pytree.tree_leaves(run(model, inputs)) if isinstance(t, Tensor)).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][key])


def test_train_mode_is_the_originals(name):
    case = ZOO[name]
    original, inputs = case.model(), case.example()
    prepared = qtk.prepare_model(copy.deepcopy(original), inputs)
    assert not prepared.report.notes
    for mode in (True, False, True):
        original.train(mode)
        prepared.train(mode)
        outputs = []
        for model in (original, prepared):
            torch.manual_seed(3)
            outputs.append(run(model, inputs))
        for a, b in zip(*map(pytree.tree_leaves, outputs), strict=True):
            torch.testing.assert_close(a, b)
    for key, value in original.state_dict().items():
        torch.testing.assert_close(prepared.state_dict()[key], value)


def test_the_plan_is_pure_and_insertion_is_undone_exactly(name):
    prepared = copy.deepcopy(prepared_once(name))
    before, code = listing(prepared), prepared.code
    first = plan_of(prepared)
    assert plan_of(prepared) == first
    assert listing(prepared) == before
    insert(prepared, first)
    assert len(listing(prepared)[0]) > len(before[0])
    remove(prepared)
    assert listing(prepared) == before
    assert prepared.code == code


def test_bypassed_is_float_and_uncalibrated_is_an_error(name):
    case = ZOO[name]
    original, inputs = case.model(), case.example()
    sim = qtk.QuantSim(prepared_once(name), inputs)
    with torch.no_grad():
        with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
            assert equal(run(sim.model, inputs), run(original, inputs))
        with pytest.raises(NotCalibratedError):
            run(sim.model, inputs)


def test_every_float_value_has_a_site_or_a_reason(name):
    prepared = prepared_once(name)
    assert prepared.report.unknown_ops == ()
    decided = plan_of(prepared)
    flow = Flow(prepared.graph)
    for node in prepared.graph.nodes:
        if is_float(node) and node.op != "get_attr" and flow.carried(node) is None and node.users:
            site = value_site(node)
            constant = flow.row(node) is not None and flow.is_constant(node)
            assert site in decided or site in decided.unquantized or constant, site.name


def test_per_channel_weights_reach_every_weighted_op(name):
    case = ZOO[name]
    sim = qtk.QuantSim(prepared_once(name), case.example())
    flow, seen = Flow(sim.model.graph), 0
    for node in sim.model.graph.nodes:
        row = row_of(node)
        if row is None or row.weight_axes is None:
            continue
        for port in [p for p in flow.weight_ports(node) if flow.is_static(p.value)]:
            seen += 1
            # between the parameter and the op sits a per-channel quantizer
            value = port.value
            while not (value.op == "call_module" and "qtk_quantizers" in str(value.target)):
                value = value.all_input_nodes[0]
            spec = sim.model.get_submodule(str(value.target)).spec
            assert isinstance(spec.granularity, PerChannel), f"{value.target} of {node}"
    weighted = sum(isinstance(m, (nn.Linear, nn.Embedding)) or ("Conv" in type(m).__name__ and hasattr(m, "stride"))
                   for m in case.model().modules())
    assert seen >= weighted


def test_the_simulation_is_close_to_float_at_16_bits(name):
    case = ZOO[name]
    sim = calibrated(case, weight_bits=16, activation_bits=16)
    with torch.no_grad():
        expected = pytree.tree_leaves(run(case.model(), case.example()))
        found = pytree.tree_leaves(run(sim.model, case.example()))
    for a, b in zip(expected, found, strict=True):
        if isinstance(a, Tensor) and a.is_floating_point():
            noise, signal = float((a - b).double().square().sum()), float(a.double().square().sum())
            assert noise < 1e-5 * signal  # 50 dB; 16 bits leave about 80


def test_codes_are_integers_in_range_at_every_site(name):
    case = ZOO[name]
    sim = calibrated(case)
    values: dict[str, Tensor] = {}
    for site, quantizer in sim.quantizers.items():
        quantizer.register_forward_hook(lambda module, args, out, site=site: values.__setitem__(site, out))
    with torch.no_grad():
        run(sim.model, case.example(seed=9))
    for site, encoding in sim.encodings().items():
        spec, scale, zero = encoding.spec, encoding.scale.double(), encoding.zero_point
        channels = spec.granularity.block_size(values[site].ndim)
        shape = [-1 if size == 1 else 1 for size in channels] if channels else [1]
        codes = values[site].double() / scale.reshape(shape)
        codes = codes + (0 if zero is None else zero.double().reshape(shape))
        assert float((codes - codes.round()).abs().max()) < 1e-2
        assert float(codes.min()) > spec.qmin - 0.5
        assert float(codes.max()) < spec.qmax + 0.5


def test_copies_states_and_files_carry_the_whole_simulation(name, tmp_path):
    case = ZOO[name]
    sim, inputs = calibrated(case, weight_bits=4), case.example(seed=9)
    with torch.no_grad():
        expected = run(sim.model, inputs)
        assert equal(run(copy.deepcopy(sim.model), inputs), expected)
        sim.save(tmp_path / "sim")
        loaded = qtk.QuantSim.load(tmp_path / "sim", prepared_once(name), case.example())
        assert equal(run(loaded.model, inputs), expected)


def test_the_simulation_exports_and_gives_gradients_to_every_weight(name):
    case = ZOO[name]
    sim, inputs = calibrated(case), case.example(batch=4)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    program = torch.export.export(sim.model, args, kwargs, strict=False)
    with torch.no_grad():
        assert equal(program.module()(*args, **kwargs), run(sim.model, inputs))
    outputs = pytree.tree_leaves(run(sim.model, inputs))
    sum(t.sum() for t in outputs if isinstance(t, Tensor) and t.requires_grad).backward()
    read = {str(node.target) for node in sim.model.graph.nodes if node.op == "get_attr"}
    missing = [key for key, parameter in sim.model.named_parameters() if key in read and parameter.grad is None]
    assert missing == []
