"""What ``prepare_model`` and ``QuantSim`` promise of models that cannot be one graph."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import qtk
from qtk.calls.call_recording import record_calls
from qtk.calls.calls import Call
from qtk.calls.inputs import split_inputs
from qtk.core.granularity import PerChannel
from qtk.errors import CaptureError, ConfigError, NotCalibratedError
from qtk.graph.graphs import graphs, roots
from qtk.quantizers.modes import in_mode
from tests.capture.islands import SIZES, calibrate, equal, is_inside, pair, simulated, weights
from tests.zoo.prepared import LIVE
from tests.zoo.python import PYTHON

every_model = pytest.mark.parametrize("name", PYTHON)


def loss(outputs: object) -> Tensor:
    leaves = [out for out in pytree.tree_leaves(outputs) if isinstance(out, Tensor) and out.requires_grad]
    return sum((out.double() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in leaves)


@pytest.mark.sample(1)
@pytest.mark.medium
@every_model
def test_computes_the_same_for_other_inputs_and_batches(name):
    entry, (model, prepared) = PYTHON[name], pair(name)
    for batch in (2, 3, 7, 1):
        assert equal(entry.run(prepared, batch), entry.run(model, batch))


@pytest.mark.sample(3)
@pytest.mark.medium
@every_model
def test_the_islands_are_the_largest_that_can_be_captured(name):
    prepared = pair(name)[1]
    assert set(roots(prepared)) == set(PYTHON[name].islands)
    rungs = {part.path: part.rung for part in prepared.report.parts}
    assert [path for path, rung in rungs.items() if rung == "export"] == list(PYTHON[name].modules)
    assert rungs[""] == prepared.report.rung == "python"


@pytest.mark.sample(3)
@pytest.mark.medium
@every_model
def test_the_report_gives_a_reason_and_a_share_for_every_part(name):
    model, prepared = pair(name)
    report, total = prepared.report, sum(p.numel() for p in model.parameters())
    assert report.complete
    assert report.dynamic
    assert report.eval_difference == report.train_difference == 0.0
    assert all(part.reason for part in report.parts if part.rung == "python")
    assert {part.path: part.parameters for part in report.parts} == {
        part.path: sum(p.numel() for p in model.get_submodule(part.path).parameters()) for part in report.parts
    }
    inside = {p for island in PYTHON[name].modules for p in model.get_submodule(island).parameters()}
    assert report.captured == sum(p.numel() for p in inside) / total
    assert report.covered is None
    lines = str(report).splitlines()
    assert f"graphs hold {report.captured:.1%} of the parameters" in lines
    for part in report.parts[1:]:
        share = f"  {part.path} ({part.type_name}): {part.rung}, {part.parameters / total:.1%} of the parameters"
        assert any(line.startswith(share) for line in lines)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("excluded", [[], ["minus"]])
def test_what_is_not_called_is_listed_and_runs_in_float_when_it_is(excluded):
    model, x = PYTHON["branch"].model(), torch.randn(4, 8) - 100
    prepared = qtk.prepare_model(model, PYTHON["branch"].inputs(), modules_to_exclude=excluded)
    (part,) = [part for part in prepared.report.parts if part.path == "minus"]
    assert (part.rung, part.parameters) == ("excluded" if excluded else "not called", 36)
    assert equal(prepared(x), model(x))
    assert prepared.minus is not model.minus
    assert prepared.minus.weight is model.minus.weight


@pytest.mark.medium
def test_what_the_inputs_do_not_reach_is_an_error_unless_it_is_excluded_by_name():
    entry = PYTHON["branch"]
    message = r"do not reach these.*:\n  minus \(Linear, 36 parameters\)\npass inputs .*modules_to_exclude=\['minus'\]"
    with pytest.raises(CaptureError, match=message):
        qtk.QuantSim(entry.model(), entry.inputs())
    prepared = qtk.prepare_model(entry.model(), entry.inputs(), modules_to_exclude=["minus"])
    sim = qtk.QuantSim(prepared, entry.inputs())
    reasons = {site.name: reason for site, reason in sim.plan.unquantized.items()}
    assert reasons["minus.weight"] == "its module is excluded"


@pytest.mark.medium
@pytest.mark.sample(3)
@every_model
def test_keeps_names_and_tensors(name):
    model, prepared = pair(name)
    assert list(prepared.state_dict()) == list(model.state_dict())
    for kind in ("named_parameters", "named_buffers"):
        originals, own = (dict(getattr(each, kind)(remove_duplicate=False)) for each in (model, prepared))
        assert list(own) == list(originals)
        assert all(own[key] is originals[key] for key in own)


@pytest.mark.medium
@pytest.mark.sample(2)
@every_model
def test_bypassed_is_float_bit_for_bit_and_uncalibrated_is_an_error(name):
    entry, (model, prepared) = PYTHON[name], pair(name)
    sim = qtk.QuantSim(prepared, entry.inputs(), config=LIVE)
    with torch.no_grad():
        with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
            assert all(equal(entry.run(sim.model, batch), entry.run(model, batch)) for batch in SIZES)
        with pytest.raises(NotCalibratedError):
            entry.run(sim.model)


@pytest.mark.medium
@pytest.mark.sample(5)
@every_model
def test_every_weight_in_an_island_is_per_channel_under_its_full_name(name):
    sim = simulated(name)
    granularities = {site.name: decided.spec.granularity for site, decided in sim.plan.items()}
    assert weights(name)
    for site in weights(name):
        assert granularities[site] == PerChannel(0)
        weight = pair(name)[0].get_parameter(site)
        assert sim.encodings()[site].scale.shape == weight.shape[:1]
        assert torch.allclose(sim.encodings()[site].scale, weight.detach().abs().flatten(1).amax(1) / 127, rtol=0.01)


@pytest.mark.medium
@pytest.mark.sample(4)
@every_model
def test_sites_are_named_by_the_path_in_the_whole_model(name):
    modules = dict(pair(name)[0].named_modules(remove_duplicate=False))
    for site in simulated(name).plan:
        owner = site.owner.partition("@")[0]
        assert is_inside(owner, PYTHON[name].islands), site
        assert owner in modules or owner.rpartition(".")[0] in modules, site
    assert len({site.name for site in simulated(name).plan}) == len(simulated(name).plan)


@pytest.mark.sample(4)
@pytest.mark.medium
@every_model
def test_a_simulation_is_read_back_and_copied_whole_and_apart(name, tmp_path):
    entry, sim = PYTHON[name], simulated(name)
    with torch.no_grad():
        expected = entry.run(sim.model)
        assert not equal(expected, entry.run(pair(name)[0]))
        sim.save(tmp_path / "sim")
        loaded = qtk.QuantSim.load(tmp_path / "sim", pair(name)[1], entry.inputs())
        assert equal(entry.run(loaded.model), expected)
        twin = copy.deepcopy(sim.model)
        assert list(twin.state_dict()) == list(sim.model.state_dict())
        assert equal(entry.run(twin), expected)
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.zero_()
        assert equal(entry.run(sim.model), expected)
        assert all(bool(value.any()) for key, value in sim.model.state_dict().items() if key in weights(name))


@pytest.mark.medium
@pytest.mark.sample(3)
@every_model
def test_modes_reach_every_module(name):
    model, prepared = pair(name)
    assert not any(module.training for module in prepared.modules())
    twin = copy.deepcopy(prepared)
    assert all(module.training for module in twin.train().modules())
    assert not any(module.training for module in (*prepared.modules(), *model.modules()))
    assert not any(module.training for module in twin.eval().modules())


@pytest.mark.medium
def test_train_mode_is_the_originals_with_its_own_dropout_and_statistics():
    entry, models = PYTHON["deep"], [PYTHON["deep"].model() for _ in range(2)]
    prepared = qtk.prepare_model(models[1], entry.inputs())
    outputs = []
    for each in (models[0], prepared):
        torch.manual_seed(3)
        outputs.append(entry.run(each.train(), 5))
    assert torch.equal(*outputs)
    assert equal(models[0].state_dict(), models[1].state_dict())
    assert not equal(models[0].state_dict(), entry.model().state_dict())
    assert models[1].training is False


@pytest.mark.medium
def test_the_code_of_the_model_itself_sees_its_mode():
    class Switches(type(pair("branch")[0])):
        def forward(self, x):
            return super().forward(x) * (3 if self.training else 2)

    model, x = Switches().eval(), PYTHON["branch"].inputs()
    prepared, outputs = qtk.prepare_model(model, x), {}
    for mode in (True, False):
        outputs[mode] = prepared.train(mode)(x)
        assert torch.equal(outputs[mode], model.train(mode)(x))
    assert not torch.equal(outputs[True], outputs[False])


@pytest.mark.sample(5)
@pytest.mark.medium
@every_model
def test_follows_to_another_dtype(name):
    entry = PYTHON[name]
    inputs = pytree.tree_map(
        lambda leaf: leaf.bfloat16() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, entry.inputs(3)
    )
    args, kwargs = split_inputs(inputs)
    model, twin = entry.model().to(torch.bfloat16), copy.deepcopy(pair(name)[1]).to(torch.bfloat16)
    assert all(parameter.dtype is torch.bfloat16 for parameter in twin.parameters())
    assert equal(twin(*args, **kwargs), model(*args, **kwargs))


@pytest.mark.sample(6)
@pytest.mark.medium
@every_model
def test_follows_to_another_device(name):
    entry, sim = PYTHON[name], copy.deepcopy(simulated(name).model)
    calls = record_calls(sim, [Call(*split_inputs(entry.inputs()), None)], of=roots(sim).values())
    sim.to("meta")
    assert {tensor.device.type for tensor in (*sim.parameters(), *sim.buffers())} == {"meta"}
    assert len(calls) == len(entry.islands)
    for island, recorded in calls.items():
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (recorded[0].args, recorded[0].kwargs)
        )
        assert {leaf.device.type for leaf in pytree.tree_leaves(island(*args, **kwargs))} == {"meta"}


@pytest.mark.medium
@every_model
def test_gradients_are_the_originals_and_reach_every_weight_through_quantizers(name):
    entry, (model, prepared) = PYTHON[name], pair(name)
    parameters = list(model.parameters())
    wanted, found = (
        torch.autograd.grad(loss(entry.run(each)), parameters, allow_unused=True) for each in (model, prepared)
    )
    assert [grad is None for grad in found] == [grad is None for grad in wanted]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, wanted, strict=True) if b is not None)
    simulation = simulated(name).model
    through = torch.autograd.grad(loss(entry.run(simulation)), list(simulation.parameters()), allow_unused=True)
    named = dict(zip(dict(simulation.named_parameters()), through, strict=True))
    reached = {key for (key, _), grad in zip(model.named_parameters(), wanted, strict=True) if grad is not None}
    assert reached
    assert all(named[key] is not None and bool(named[key].isfinite().all()) for key in reached)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "excluded"),
    [("deep", "stages.one.first"), ("many_sizes", "also"), ("detector", "backbone.0"),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         ("experts", "experts.1"), ("iterated", "blocks.2"), ("containers", "gather"), ("other_methods", "codec")))],
)
def test_excluded_modules_stay_in_float_inside_a_tree(name, excluded):
    entry, model = PYTHON[name], PYTHON[name].model()
    for what in (excluded, model.get_submodule(excluded)):
        prepared = qtk.prepare_model(model, entry.inputs(), modules_to_exclude=[what])
        sim = calibrate(name, qtk.QuantSim(prepared, entry.inputs()))
        alias = "head" if excluded == "also" else excluded
        quantized = {site for site in weights(name) if site in sim.quantizers}
        assert quantized == {site for site in weights(name) if not is_inside(site, [alias])}
        assert quantized
        assert equal(entry.run(prepared, 5), entry.run(model, 5))
        assert prepared.report.notes == () or excluded == "also"


@pytest.mark.medium
def test_an_excluded_module_with_two_names_leaves_no_note():
    model, entry = PYTHON["many_sizes"].model(), PYTHON["many_sizes"]
    assert qtk.prepare_model(model, entry.inputs(), modules_to_exclude=["also"]).report.notes == ()


@pytest.mark.parametrize(
    ("name", "glob"), [("deep", "stages.one.*.body.0"), ("iterated", "heads.mean"), ("detector", "backbone.0")]
)
def test_rules_match_the_path_in_the_whole_model(name, glob):
    rule = {"match": {"path": glob}, "weight": {"bits": 4}}
    sim = qtk.QuantSim(pair(name)[1], PYTHON[name].inputs(), config={"version": 1, "rules": [rule]})
    narrow = {site.name for site, decided in sim.plan.items() if decided.spec.dtype.bits == 4}
    prefix, _, suffix = glob.partition("*")
    assert narrow == {site for site in weights(name) if site.startswith(prefix) and site.endswith(f"{suffix}.weight")}
    assert narrow


def test_a_rule_for_a_path_inside_an_island_alone_matches_nothing():
    rule = {"match": {"path": "first.body.0"}, "weight": {"bits": 4}}
    with pytest.raises(ConfigError, match=r"rules\[0\] .*: no op has the path first.body.0; did you mean 'stages"):
        qtk.QuantSim(pair("deep")[1], PYTHON["deep"].inputs(), config={"version": 1, "rules": [rule]})


@pytest.mark.medium
def test_an_expert_that_saw_no_token_takes_any_number_of_them_later():
    model, one = PYTHON["experts"].model(), torch.ones(1, 1, 8)
    prepared = qtk.prepare_model(model, one)
    sizes = {call.numel for calls in record_calls(model, [Call((one,), {}, None)]).values() for call in calls}
    assert sizes == {0, 8}
    assert prepared.report.dynamic
    for batch in (1, 3):
        assert equal(prepared(PYTHON["experts"].inputs(batch)), model(PYTHON["experts"].inputs(batch)))


def test_a_constant_needs_no_quantizer_and_says_why():
    reasons = {site.name: reason for site, reason in simulated("no_input").plan.unquantized.items()}
    assert reasons["prompt.fc:out"] == "computed from parameters"
    assert "prompt.fc.weight" not in simulated("no_input").quantizers


def test_attributes_that_python_asks_of_an_island_are_the_originals():
    model, prepared = pair("reads_attributes")
    assert prepared.backbone.out_channels == 8
    assert prepared.fc.weight is model.fc.weight
    assert prepared.fc.out_features == 8
    assert "no len()" in next(part.reason for part in prepared.report.parts if part.path == "blocks")


@pytest.mark.medium
def test_a_plain_attribute_set_on_the_prepared_model_is_what_its_code_reads():
    class Shifted(type(pair("branch")[0])):
        shift = 0.0

        def forward(self, x):
            return super().forward(x) + self.shift

    x = PYTHON["branch"].inputs()
    prepared = qtk.prepare_model(Shifted(), x)
    expected = prepared(x) + 2.0
    prepared.shift = 2.0
    assert torch.equal(prepared(x), expected)


def test_a_child_or_parameter_replaced_on_the_prepared_model_is_the_one_its_code_uses():
    prepared, x = copy.deepcopy(pair("branch")[1]), PYTHON["branch"].inputs()
    prepared.plus = nn.Identity()
    assert torch.equal(prepared(x), prepared.body(x))
    prepared = copy.deepcopy(pair("no_input")[1])
    prepared.fc.weight = nn.Parameter(torch.zeros(4, 8))
    assert torch.equal(prepared(x), prepared.fc.bias.expand(2, 4))


def test_a_child_with_two_names_is_one_island():
    prepared = pair("many_sizes")[1]
    assert prepared.also is prepared.head
    assert [*graphs(prepared)] == ["stem", "head"]


def test_a_tied_weight_has_a_quantizer_in_each_island_that_reads_it():
    sim = simulated("tied_islands")
    assert {"encoder.embedding.weight", "head.weight"} <= set(sim.quantizers)
    assert sim.model.head.weight is sim.model.encoder.embedding.weight


class Pool(nn.Module):
    """A value for each box from the map: a loop over the boxes, which a graph has unrolled."""

    def forward(self, features, boxes):
        return torch.stack([features.mean((2, 3))[0] * box.sum() for box in boxes])


class WeightedPool(Pool):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, features, boxes):
        return super().forward(features, boxes) + torch.stack([self.fc(box) for box in boxes])


class Proposals(nn.Module):
    """As many boxes as have a positive score go through the pool."""

    def __init__(self, pool):
        super().__init__()
        self.conv, self.score, self.pool, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 1), pool, nn.Linear(8, 4)

    def forward(self, x):
        features = self.conv(x)
        rows = features.flatten(2)[0].T
        boxes = rows[self.score(rows)[:, 0] > 0]
        return self.head(self.pool(features, boxes))


def proposals(pool):
    torch.manual_seed(0)
    model = Proposals(pool).eval()
    return model, qtk.prepare_model(model, torch.randn(1, 3, 6, 6)), [torch.randn(1, 3, 6, 6) for _ in range(3)]


@pytest.mark.medium
@pytest.mark.parametrize(("pool", "rung"), [(Pool, "export"), (WeightedPool, "python")])
def test_a_loop_over_boxes_is_one_op_and_one_with_weights_stays_in_python(pool, rung):
    model, prepared, batches = proposals(pool())
    (part,) = [part for part in prepared.report.parts if part.path == "pool"]
    assert part.rung == rung
    if pool is WeightedPool:
        assert part.reason == ("its graph would serve one length of boxes.shape[0] alone (the loop over it is "
                               "unrolled), and other inputs have another")
    assert len({len(model(x)) for x in batches}) > 1
    for x in batches:
        assert torch.equal(prepared(x), model(x))
    sim = qtk.QuantSim(prepared, torch.randn(1, 3, 6, 6))
    sim.compute_encodings(batches, progress=False)
    assert ("pool.fc.weight" in sim.quantizers) == (pool is WeightedPool)
    assert sim.model(batches[0]).isfinite().all()


@pytest.mark.medium
def test_an_island_of_one_length_that_data_do_not_change_stays_and_names_its_remedy():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            state = x[:, 0]
            for step in range(x.shape[1]):
                state = torch.tanh(self.fc(x[:, step]) + state)
            return state

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.head = Recurrent(), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.net(x) * (1 if float(x.sum()) > 0 else -1))

    model, x = Around().eval(), torch.randn(2, 5, 8)
    prepared = qtk.prepare_model(model, x)
    with pytest.raises(CaptureError, match=r"the loop over it is unrolled; .*modules_to_exclude=\['net'\]") as caught:
        prepared(torch.randn(2, 7, 8))
    assert 'dynamic_shapes="all"' not in str(caught.value)
    excluded, longer = qtk.prepare_model(model, x, modules_to_exclude=["net"]), torch.randn(2, 7, 8)
    assert torch.equal(excluded(longer), model(longer))


class Steps(nn.Module):
    """Calls its child with as many steps of axis 1 as are above a threshold, at least one."""

    threshold = 5.0

    def __init__(self):
        super().__init__()
        self.child, self.head = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        count = max(1, int((x[:, :, 0].mean(0) > self.threshold).sum()))
        return self.head(self.child(x[:, :count]))


@pytest.mark.slow
def test_a_module_called_with_one_step_takes_several_later():
    model, x = Steps().eval(), torch.randn(2, 6, 8)
    prepared = qtk.prepare_model(model, x)
    assert torch.equal(prepared(x), model(x))
    model.threshold = prepared.threshold = -5.0
    assert model(x).shape == (2, 6, 3)
    assert torch.equal(prepared(x), model(x))
    assert {part.path: part.rung for part in prepared.report.parts}["child"] == "export"
