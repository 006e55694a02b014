"""What ``prepare_model`` promises of every model, and what it says of bad ones."""

import collections
import copy
import dataclasses
import threading
import warnings

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import qtk
from qtk.capture import fallback
from qtk.errors import CalibrationError, CaptureError, ConfigError, ExportError
from qtk.graph.sites import EXCLUDED, label, value_site
from qtk.workflow.prepare import prepare_model
from tests.zoo.models import ZOO
from tests.zoo.prepared import pair

every_model = pytest.mark.parametrize("name", ZOO)
X = torch.randn(4, 8)


def tensors(tree):
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.mark.sample(1)
@pytest.mark.medium
@every_model
def test_computes_the_same_for_other_batches_too(name):
    entry, (model, prepared) = ZOO[name], pair(name)
    for batch in (2, 5, 1) if entry.dynamic else (2,):
        with torch.enable_grad():  # torch's encoder layer takes another path without gradients
            expected, found = entry.run(model, batch), entry.run(prepared, batch)
        assert pytree.tree_structure(found) == pytree.tree_structure(expected)
        assert all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(expected), strict=True))
    assert prepared.report.dynamic == entry.dynamic
    assert prepared.report.rung == "export"


@pytest.mark.sample(3)
@pytest.mark.medium
@every_model
def test_keeps_names_tensors_and_flags(name):
    model, prepared = pair(name)
    assert list(prepared.state_dict()) == list(model.state_dict())
    originals, own = dict(model.named_parameters()), dict(prepared.named_parameters())
    assert list(own) == list(originals)
    assert all(own[key] is originals[key] for key in own)
    buffers = dict(prepared.named_buffers())
    assert all(buffers[key] is buffer for key, buffer in model.named_buffers())


@pytest.mark.sample(6)
@pytest.mark.medium
@every_model
def test_trains_the_same(name):
    """Gradients in eval mode, bit for bit; the report on train mode is what the zoo says."""
    entry, (model, prepared) = ZOO[name], pair(name)
    gradients = []
    for each in (model, prepared):
        outputs = [out for out in tensors(entry.run(each)) if out.requires_grad]
        loss = sum((out.double() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in outputs)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients.append(torch.autograd.grad(loss, parameters, allow_unused=True) if outputs else ())
    for expected, found in zip(*gradients, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    difference = prepared.report.train_difference
    assert (difference is not None) == entry.trains
    assert (difference or 0.0) < 1e-5


@pytest.mark.medium
@pytest.mark.sample(7)
@every_model
def test_modes_toggle_every_module(name):
    prepared = copy.deepcopy(pair(name)[1])
    assert not any(module.training for module in prepared.modules())
    assert all(module.training for module in prepared.train().modules())
    assert not any(module.training for module in prepared.eval().modules())


@pytest.mark.sample(4)
@every_model
def test_a_copy_is_whole_and_apart(name):
    entry, (model, prepared) = ZOO[name], pair(name)
    twin = copy.deepcopy(prepared)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(tensors(entry.run(twin)), tensors(entry.run(prepared)), strict=True))
    assert [node.name for node in twin.graph.nodes] == [node.name for node in prepared.graph.nodes]
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert any(bool(p.any()) for p in prepared.parameters()) or not list(prepared.parameters())


@pytest.mark.medium
def test_the_original_is_left_as_it_was():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.bn, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.attention = None

        def forward(self, x):
            self.calls += 1
            self.attention = self.fc(x)
            return self.drop(self.bn(self.attention))

    model = Net().train()
    model.bn.eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random, x = torch.get_rng_state(), X.clone()
    prepared = prepare_model(model, x)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.attention is None
    assert [model.training, model.bn.training, model.fc.training] == [True, False, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, X)
    flags = [prepared.training, prepared.bn.training, prepared.drop.training]
    assert flags == [True, False, True]


@pytest.mark.medium
def test_a_model_that_counts_in_eval_mode_still_counts():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    prepared = prepare_model(Counter(), X)
    prepared(X)
    assert torch.equal(prepared(X), X * 2)


def test_a_batch_of_one_is_enough_also_for_batch_norm():
    prepared = prepare_model(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), X[:1])
    assert prepared.report.dynamic
    assert prepared.report.notes == ()
    assert prepared.eval()(X).shape == (4, 4)


@pytest.mark.medium
def test_excluded_modules_are_marked_under_every_name():
    block = ZOO["reused_block"].model()
    for name in ("first", "second", block.first):
        prepared = prepare_model(block, ZOO["reused_block"].inputs(), modules_to_exclude=[name], verify=False)
        marks = {str(node.target): label(node, EXCLUDED) for node in prepared.graph.nodes if "call" in node.op}
        assert marks.pop("aten.add.Tensor") is None
        assert set(marks.values()) == {"modules_to_exclude"}


@pytest.mark.medium
def test_an_excluded_block_takes_what_is_inside():
    prepared = prepare_model(ZOO["vit"].model(), ZOO["vit"].inputs(), modules_to_exclude=["blocks.1"])
    for node in prepared.graph.nodes:
        if node.op.startswith("call"):
            inside = value_site(node).owner.startswith("blocks.1")
            assert (label(node, EXCLUDED) == "modules_to_exclude") == inside, node


@pytest.mark.medium
def test_an_excluded_block_is_found_in_a_symbolic_trace():
    class Traced(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2)

        def forward(self, x):
            if not isinstance(x, fx.Proxy) and bool(x.isnan().any()):
                raise ValueError
            return self.head(self.body(x))

    prepared = prepare_model(Traced(), X, modules_to_exclude=["body"])
    assert prepared.report.rung == "fx + export"
    marks = [label(node, EXCLUDED) for node in prepared.graph.nodes if "call" in node.op]
    assert marks == ["modules_to_exclude", "modules_to_exclude", None]


def test_exclusions_without_inputs_are_kept_until_there_are_some():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).eval()
    traced = prepare_model(net, modules_to_exclude=["1"])
    assert prepare_model(traced, X).report.excluded == ("1",)
    assert prepare_model(traced, X, modules_to_exclude=["0"]).report.excluded == ("0", "1")


def test_an_unknown_exclusion_names_the_nearest():
    with pytest.raises(CaptureError, match=r"'blocks.1.atn' is no submodule of TinyViT; did you mean 'blocks.1.attn'"):
        prepare_model(ZOO["vit"].model(), ZOO["vit"].inputs(), modules_to_exclude=["blocks.1.atn"])
    with pytest.raises(CaptureError, match="a Linear is no submodule of TinyViT"):
        prepare_model(ZOO["vit"].model(), ZOO["vit"].inputs(), modules_to_exclude=[nn.Linear(1, 1)])


def test_an_excluded_module_that_never_runs_is_a_note():
    prepared = prepare_model(ZOO["tied"].model(), ZOO["tied"].inputs(), modules_to_exclude=["never"])
    assert prepared.report.notes == ("modules_to_exclude: never runs no op",)


def test_a_model_that_does_not_run_says_why():
    with pytest.raises(CaptureError, match=r"Linear does not run on its example inputs \(tensors of shape "
                       r"\[\(4, 8\)\]\): RuntimeError: .*mat1 and mat2 shapes"):
        prepare_model(nn.Linear(7, 2), X)


class Mutating(nn.Module):
    """Writes to its input, and reads it again; with ``branches`` in code that torch.export refuses."""

    def __init__(self, branches):
        super().__init__()
        self.fc, self.branches = nn.Linear(8, 4), branches

    def forward(self, x):
        x.mul_(2)[:, 0] = 0
        if self.branches and x.sum() > 1e9:
            return x
        return self.fc(x) + x[:, 4:]


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("model", [
    Mutating(branches=False), Mutating(branches=True), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 4)),
    nn.Sequential(nn.Dropout(0.5, inplace=True), nn.ReLU(inplace=True), nn.Linear(8, 4)),
])
def test_a_model_that_writes_to_its_input_works_on_a_copy(model):
    model, x = model.eval(), X.clone()
    prepared = prepare_model(model, x)
    assert torch.equal(x, X)
    assert torch.equal(prepared(x), model(X.clone()))
    sim = qtk.QuantSim(prepared, x)
    sim.compute_encodings([x, x], progress=False)
    assert torch.equal(sim.model(x), sim.model(x))
    assert torch.equal(x, X)
    assert f"the forward of {type(model).__name__} changes its input 0 in place; the prepared" in str(prepared.report)
    prepared.zero_grad()
    given = X.clone().requires_grad_()
    prepared(given).sum().backward()
    assert given.grad is not None
    model.zero_grad()


def test_a_namedtuple_class_made_in_forward():
    class Pair(nn.Linear):
        def forward(self, x):
            return {"pair": [collections.namedtuple("Pair", "left right")(super().forward(x), x * 2)]}

    model = Pair(8, 4)
    prepared = prepare_model(model, X)
    assert prepared.report.rung == "export"
    assert prepared.report.train_difference == 0
    pair = prepared(X)["pair"][0]
    assert (type(pair).__name__, pair._fields) == ("Pair", ("left", "right"))
    assert torch.equal(pair.left, model(X)["pair"][0].left)


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, X)])
def test_scripted_models_keep_their_mode_and_cannot_be_quantized(make):
    model = make(nn.Linear(8, 4)).train()
    prepared = prepare_model(model, X).eval()
    prepared(X)
    assert (model.training, prepared.training) == (True, False)
    assert [a is b for a, b in zip(prepared.parameters(), model.parameters(), strict=True)] == [True, True]
    assert type(copy.deepcopy(prepared)) is type(prepared)
    with pytest.raises(ConfigError, match=r"weight: .*Linear is a ScriptModule.*pass the module that it was scripted"):
        qtk.QuantSim(model, X)
    assert model.training


@pytest.mark.medium
def test_a_wrong_capture_falls_to_the_next_rung_and_the_report_names_it(monkeypatch):
    real = fallback.canonicalize

    def wrong(program, original, kind, **options):
        prepared, swaps = real(program, original, kind, **options)
        for node in prepared.graph.nodes:
            if node.target is torch.ops.aten.relu.default:
                node.target = torch.ops.aten.sigmoid.default
        prepared.recompile()
        return prepared, swaps

    monkeypatch.setattr(fallback, "canonicalize", wrong)
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    prepared = prepare_model(model, X)
    assert torch.equal(prepared(X), model(X))
    rungs = {part.path: part.rung for part in prepared.report.parts}
    assert rungs == {"": "python", "0": "export", "1": "opaque"}
    assert "output differs by" in prepared.report.parts[2].reason
    assert prepare_model(model, X, verify=False).report.eval_difference is None


def test_train_mode_that_is_not_in_the_graph_is_noted():
    (line,) = pair("branches_on_training")[1].report.train_notes
    assert line == "the model (StochasticDepth) in train mode alone calls torch's mul(2)"


def test_stochastic_depth_is_recovered_and_the_rest_is_still_compared():
    class DropPath(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop_prob = 0.5

        def forward(self, x):
            if self.drop_prob == 0.0 or not self.training:
                return x
            return x * (torch.rand(len(x), 1) > self.drop_prob)

    prepared = prepare_model(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), DropPath()), X)
    assert prepared.report.train_difference == 0.0
    assert "1 × DropPath recovered as modules" in str(prepared.report)
    assert prepared.report.train_notes == ()


@pytest.mark.medium
def test_without_inputs_the_trace_waits_for_them():
    model = ZOO["vit"].model()
    waiting = prepare_model(model)
    assert not waiting.report.complete
    assert list(waiting.state_dict()) == list(model.state_dict())
    assert torch.equal(waiting(ZOO["vit"].inputs()), model(ZOO["vit"].inputs()))
    prepared = prepare_model(waiting, ZOO["vit"].inputs())
    direct = pair("vit")[1]
    assert prepared.report.complete
    assert [node.name for node in prepared.graph.nodes] == [node.name for node in direct.graph.nodes]
    assert prepared.head.weight is model.head.weight
    sim = qtk.QuantSim(copy.deepcopy(waiting), ZOO["vit"].inputs())
    assert "blocks.0.attn.qkv.weight" in sim.quantizers


def test_without_inputs_an_untraceable_model_asks_for_them():
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="pass example_inputs"):
        prepare_model(Branch())


def test_a_prepared_model_is_returned_as_it_is():
    prepared = pair("splits")[1]
    assert prepare_model(prepared, ZOO["splits"].inputs()) is prepared
    with pytest.raises(CaptureError, match="prepared already"):
        prepare_model(prepared, ZOO["splits"].inputs(), modules_to_exclude=["fc"])


def test_the_report_prints():
    text = str(pair("batch_norms")[1].report)
    assert "captured by export in" in text
    assert "dynamic batch" in text
    assert "7 × batch_norm recovered as modules" in text
    assert "in eval mode: 0" in text


def meta_simulation():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    return qtk.QuantSim(model.to("meta"), torch.randn(2, 3, 8, 8, device="meta")), model


@pytest.mark.medium
def test_a_meta_model_has_the_plan_of_one_with_values():
    sim, model = meta_simulation()
    torch.manual_seed(0)
    real = model.to_empty(device="cpu").apply(lambda module: getattr(module, "reset_parameters", lambda: None)())
    assert str(sim.plan) == str(qtk.QuantSim(real, torch.randn(2, 3, 8, 8)).plan)
    report = sim.model.report
    assert (report.eval_difference, report.train_difference) == (None, None)
    assert "tensors without values (meta): nothing could be compared with the original" in report.notes


def test_a_meta_model_cannot_be_calibrated_or_saved(tmp_path):
    sim, _ = meta_simulation()
    x = torch.randn(2, 3, 8, 8)
    for data in ([x], [x.to("meta")]):
        with pytest.raises(CalibrationError, match="meta device, whose tensors have no values: make"):
            sim.compute_encodings(data, progress=False)
    with pytest.raises(CalibrationError, match="meta device"):
        qtk.apply_gptq(sim, [x], progress=False)
    with pytest.raises(ExportError, match="meta device"):
        sim.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.medium
@pytest.mark.parametrize("of", [
    lambda net: (module for module in (net[1],)), lambda net: net[1:], lambda net: nn.ModuleList(net)[1:],
    lambda net: "1", lambda net: {net[1]: None}.keys(),
])
def test_modules_to_exclude_may_be_any_iterable_or_one_name(of):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    sim = qtk.QuantSim(prepare_model(net, torch.randn(3, 4), modules_to_exclude=of(net)), torch.randn(3, 4))
    assert "0.weight" in sim.quantizers
    assert "1.weight" not in sim.quantizers


@pytest.mark.medium
def test_no_module_to_exclude_from_a_prepared_model_may_be_an_iterator():
    prepared = prepare_model(nn.Linear(4, 2), torch.randn(3, 4))
    assert prepare_model(prepared, torch.randn(3, 4), modules_to_exclude=iter([])) is prepared
    traced = prepare_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), modules_to_exclude=iter(["0"]))
    assert "0.weight" not in qtk.QuantSim(traced, torch.randn(3, 4)).quantizers


@pytest.mark.medium
def test_what_cannot_be_copied_is_an_error_that_names_the_way_out():
    class Locked(nn.Sequential):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    net, x = Locked(nn.Linear(4, 4)), torch.randn(3, 4)
    net.lock = threading.Lock()
    with pytest.raises(CaptureError, match=r"the model cannot be copied: .*lock.*; pass in_place=True"):
        qtk.QuantSim(net, x)
    assert "0.weight" in qtk.QuantSim(net, x, in_place=True).quantizers


def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)])
    with pytest.raises(CaptureError, match="Linear takes or returns nested tensors; pad them"):
        prepare_model(nn.Linear(4, 4), x)


@dataclasses.dataclass
class Hidden:
    h: torch.Tensor
    inner: object = None


def test_two_instances_of_a_dataclass_that_torch_does_not_know():
    class Both(nn.Module):
        def forward(self, states):
            first, second = states
            return Hidden(first.h + second.h, Hidden(first.inner.h - second.h))

    given = [Hidden(torch.ones(2, 3), Hidden(torch.ones(2, 3) * 2)), Hidden(torch.ones(2, 3) * 3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared = qtk.prepare_model(Both().eval(), (given,))
    assert not [each for each in caught if "already registered" in str(each.message)]
    assert [note for note in prepared.report.notes if "Hidden" in note] == [
        "Hidden is now known to torch's pytree as a dataclass"]
    found = prepared(given)
    assert torch.equal(found.h, torch.full((2, 3), 4.0))
    assert torch.equal(found.inner.h, torch.full((2, 3), -1.0))
