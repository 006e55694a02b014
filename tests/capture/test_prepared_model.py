import copy
import io
import pickle
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import qtk
from qtk.calls.served_sizes import SIZES, SizeLimit
from qtk.capture.prepared_model import PreparedGraph
from qtk.errors import CaptureError
from qtk.operators.targets import attribute
from qtk.torch_private import GRAPH_MODULE_NAMES
from qtk.workflow.prepare import prepare_model
from tests import fresh
from tests.capture.caches import Cache, Decoder, words
from tests.zoo.models import ZOO
from tests.zoo.prepared import copied, pair, simulated, slow_but


class Named(nn.Module):
    """A net whose members have the given names; the branch on data keeps it from being one graph."""

    def __init__(self, conv, drop, gain, shift, head, *, branches=False):
        super().__init__()
        torch.manual_seed(0)
        self._names, self._branches = (conv, drop, gain, shift, head), branches
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8)
        self.add_module(conv, nn.Sequential(*layers, nn.BatchNorm2d(8), nn.ReLU6()))
        self.add_module(drop, nn.Dropout(0.5))
        self.register_parameter(gain, nn.Parameter(torch.randn(1)))
        self.register_buffer(shift, torch.randn(8))
        self.add_module(head, nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)))

    def forward(self, x):
        conv, drop, gain, shift, head = self._names
        y = self._modules[drop](self._modules[conv](x).mean((2, 3)))
        if self._branches and y.sum() > 1e9:
            y = -y
        return self._modules[head](y * self._parameters[gain] + self._buffers[shift])


PLAIN, HIDDEN = "abcde", ("graph", "code", "meta", "report", "leaves")
"""Names for ``Named`` in the same order; the second are attributes of every ``PreparedGraph``."""


def prepared(name):
    return copied(name)[1]


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tensors_made_in_the_code_follow_to_another_dtype_and_back(dtype):
    entry = ZOO["creations"]
    model, x = prepared("creations"), entry.inputs(3)
    expected = model(x)
    assert torch.equal(model.to(dtype)(x.to(dtype)), entry.model().to(dtype)(x.to(dtype)))
    assert model(x.to(dtype)).dtype is dtype
    if dtype is torch.float64:  # nothing was rounded on the way
        assert torch.equal(model.float()(x), expected)


def test_tensors_made_in_the_code_follow_to_another_device():
    assert prepared("creations").to("meta")(ZOO["creations"].inputs(3).to("meta")).device.type == "meta"
    assert prepared("language_model").to("meta")(ZOO["language_model"].inputs().to("meta")).device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["creations", "language_model", "vit"])
def test_a_model_captured_on_the_cpu_runs_on_the_gpu(name):
    model = prepared(name)
    expected = model(ZOO[name].inputs(3))
    assert torch.allclose(model.cuda()(ZOO[name].inputs(3).cuda()).cpu(), expected, atol=1e-4)


def test_a_model_without_tensors_remembers_where_it_is():
    class Ramp(nn.Module):
        def forward(self, x):
            return x + torch.arange(4, dtype=x.dtype, device=x.device)

    x = torch.ones(2, 4)
    model = prepare_model(Ramp(), x)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        assert model.to(dtype)(x.to(dtype)).dtype is dtype
        model = copy.deepcopy(model)


def test_integers_stay_integers():
    model = prepared("language_model").double()
    arange = next(node for node in model.graph.nodes if "arange" in str(node.target))
    assert arange.kwargs.get("dtype") is not torch.float64
    assert model(ZOO["language_model"].inputs()).dtype is torch.float64


@pytest.mark.parametrize("name", ["tied", "reused_block", "norms", "functional"])
def test_a_copy_has_every_member_in_order_and_none_in_common(name):
    model = prepared(name).train()
    twin = copy.deepcopy(model)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert [name for name, _ in twin.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    assert {p.data_ptr() for p in twin.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())
    assert all(module.training for module in twin.modules())
    assert twin.report == model.report
    assert type(twin).__mro__[1:] == type(model).__mro__[1:]


def test_tied_parameters_stay_tied_in_a_copy():
    twin = copy.deepcopy(prepared("tied"))
    assert twin.encoder.weight is twin.decoder_weight
    block = copy.deepcopy(prepared("reused_block"))
    assert block.first is block.second


@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(ZOO, "tied", "reused_block", "nested_input", "gru", "in_place"))
def test_a_pickled_simulation_is_the_same(name):
    sim, entry = simulated(name), ZOO[name]
    file = io.BytesIO()
    torch.save(sim.model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    with torch.no_grad():
        expected, found = (pytree.tree_leaves(entry.run(each)) for each in (sim.model, twin))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True) if isinstance(a, torch.Tensor))
    assert list(twin.state_dict()) == list(sim.model.state_dict())
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in sim.model.named_parameters()]
    assert {p.data_ptr() for p in twin.parameters()}.isdisjoint(p.data_ptr() for p in sim.model.parameters())
    assert str(twin.report) == str(sim.model.report)
    assert type(twin).__mro__[1:] == type(sim.model).__mro__[1:]


def test_sizes_that_were_dynamic_are_dynamic_after_pickling():
    model = prepare_model(nn.Linear(4, 2).eval(), torch.randn(3, 4))
    twin = pickle.loads(pickle.dumps(model))
    assert twin(torch.randn(7, 4)).shape == (7, 2)
    with pytest.raises(CaptureError) as caught:
        model(torch.randn(7, 5))
    with pytest.raises(CaptureError, match=re.escape(str(caught.value))):
        twin(torch.randn(7, 5))


@pytest.mark.slow
def test_another_process_can_train_what_was_pickled(tmp_path):
    sim = simulated("residual")
    torch.save(sim.model, tmp_path / "model.pt")
    code = ("import sys, torch; model = torch.load(sys.argv[1], weights_only=False); model.train(); "
            "sum(p.sum() for p in model.parameters()).backward(); print(len(model.state_dict()))")
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], capture_output=True, text=True)
    assert run.stdout.strip() == str(len(sim.model.state_dict())), run.stderr


def test_a_pickled_graph_with_a_class_that_nobody_registered_says_what_to_run(monkeypatch):
    data = pickle.dumps(prepare_model(Decoder().eval(), words(2, 7)))
    assert type(pickle.loads(data)(words(2, 7))["cache"]) is Cache
    monkeypatch.delitem(pytree.SUPPORTED_NODES, Cache)
    with pytest.raises(CaptureError, match=r"Cache of tests.capture.caches, which is no pytree node .*; before"):
        pickle.loads(data)


def print_answer(path):
    model = torch.load(path, weights_only=False)
    print(model(ZOO["dataclass_output"].inputs()).logits.shape[0])


@pytest.mark.slow
def test_another_process_returns_the_dataclass_of_what_was_pickled(tmp_path):
    torch.save(prepared("dataclass_output"), tmp_path / "model.pt")
    finished = fresh.run(print_answer, tmp_path / "model.pt")
    assert finished.stdout == "2\n", finished.stderr


def test_every_node_knows_its_value():
    for name in ("batch_norms", "functional_dropout", "tied", "in_place"):
        model = pair(name)[1]
        for node in model.graph.nodes:
            is_module = node.op == "get_attr" and isinstance(attribute(model, node.target), nn.Module)
            if node.op != "output" and not is_module:
                assert node.meta.get("val") is not None, f"{name}: {node.format_node()}"


@pytest.mark.slow
def test_compiles_whole():
    model, entry = prepared("vit"), ZOO["vit"]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for batch in (2, 5):
        assert torch.equal(compiled(entry.inputs(batch)), model(entry.inputs(batch)))


def attributes_of_a_prepared_graph():
    graph = prepare_model(nn.ReLU(), torch.randn(2, 2))
    names = {*dir(graph), *GRAPH_MODULE_NAMES, "graph", "meta"} - {*dir(nn.Module()), "qtk_members"}
    return sorted(name for name in names if not name.startswith("__"))


class OneOfEach(nn.Module):
    """One member of a kind for every name."""

    def __init__(self, kind, names):
        super().__init__()
        torch.manual_seed(0)
        self._own = names
        for name in names:
            if kind == "module":
                self.add_module(name, nn.Linear(2, 2))
            elif kind == "parameter":
                self.register_parameter(name, nn.Parameter(torch.randn(2, 2)))
            else:
                self.register_buffer(name, torch.randn(2, 2), persistent=kind == "buffer")
        self._kind = kind

    def forward(self, x):
        for name in self._own:
            member = self.get_submodule(name) if self._kind == "module" else getattr(self, name)
            x = member(x) if self._kind == "module" else x @ member
        return x


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("kind", ["module", "parameter", "buffer", "constant"])
def test_a_member_may_have_any_name_that_a_prepared_model_uses_itself(kind):
    names = attributes_of_a_prepared_graph()
    assert {"graph", "meta", "report", "variants", "code", "example", "leaves", "recompile", "_code"} <= {*names}
    net, x = OneOfEach(kind, names).eval(), torch.randn(3, 2)
    model = prepare_model(net, x)
    assert type(model).__mro__[1] is PreparedGraph
    assert list(model.state_dict()) == list(net.state_dict())
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in net.named_buffers()]
    for made in (model, copy.deepcopy(model)):
        assert torch.equal(made(x), net(x))
    sites = [*map(str, qtk.QuantSim(net, x).quantizers)]
    suffix = ".weight" if kind == "module" else ""
    assert {f"{name}{suffix}" for name in names} <= {*sites}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("config", ["default", pytest.param("onnxruntime", marks=pytest.mark.slow)])
@pytest.mark.parametrize("branches", [False, True])
def test_hidden_names_change_no_number(config, branches, tmp_path):
    x, sims = torch.randn(4, 3, 8, 8), []
    for names in (PLAIN, HIDDEN):
        sim = qtk.QuantSim(Named(*names, branches=branches).eval(), x, config=config)
        qtk.equalize_model(sim)
        qtk.apply_smooth_quant(sim, [x])
        sim.compute_encodings([x], progress=False)
        sims.append(sim)
    plain, hidden = sims
    renamed = dict(zip(PLAIN, HIDDEN, strict=True))
    parts = [name.split(".") for name in plain.quantizers]
    expected = {".".join([renamed.get(first, first), *rest]) for first, *rest in parts}
    assert {*map(str, hidden.quantizers)} == expected
    assert torch.equal(hidden.model(x), plain.model(x))
    hidden.save(tmp_path / "saved")
    loaded = qtk.QuantSim.load(tmp_path / "saved", Named(*HIDDEN, branches=branches).eval(), x)
    assert torch.equal(loaded.model(x), plain.model(x))


@pytest.mark.medium
def test_hidden_names_in_training_and_in_new_state():
    x = torch.randn(4, 3, 8, 8)
    nets = [Named(*names) for names in (PLAIN, HIDDEN)]
    plain, hidden = models = [prepare_model(net, x) for net in nets]
    outputs = []
    for model in models:
        torch.manual_seed(1)
        outputs.append(model.train()(x))
        outputs[-1].sum().backward()
    assert torch.equal(*outputs)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), hidden.parameters(), strict=True))
    state = {name: value + 1 for name, value in nets[1].state_dict().items()}
    hidden.load_state_dict(state, assign=True)
    fresh = Named(*HIDDEN).eval()
    fresh.load_state_dict(state)
    assert torch.equal(hidden.eval()(x), fresh(x))
    assert torch.equal(hidden.double()(x.double()), fresh.double()(x.double()))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("branches", [False, True])
def test_submodules_are_found_by_the_users_names(branches):
    net = Named(*HIDDEN, branches=branches).eval()
    model = prepare_model(net, torch.randn(4, 3, 8, 8))
    assert model.get_submodule("graph.0").weight is net.get_submodule("graph.0").weight
    assert model.get_submodule("") is model
    with pytest.raises(AttributeError, match="nowhere"):
        model.get_submodule("graph.nowhere")
    with pytest.raises(CaptureError, match="setting 'graph' would have no effect"):
        prepare_model(Named(*HIDDEN).eval(), torch.randn(4, 3, 8, 8)).graph = nn.Linear(2, 2)


@pytest.mark.medium
def test_the_class_of_a_model_with_islands_is_its_own():
    """``fully_shard`` gives what it shards a new class."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) if float(x.sum()) > 0 else -self.a(x)

    x = torch.ones(2, 4)
    prepared = prepare_model(Branches().eval(), x)
    expected, kind = prepared(x), type(prepared)
    prepared.__class__ = type("Sharded", (kind,), {})
    assert type(prepared) is not kind
    assert isinstance(prepared, kind)
    assert torch.equal(prepared(x), expected)


def test_the_report_of_a_simulation_says_what_is_quantized():
    report = qtk.QuantSim(nn.Linear(8, 2), torch.randn(3, 8)).model.report
    assert report.covered == 16 / 18
    assert "88.9% of the parameters are quantized" in str(report).splitlines()


class Scaled(torch.nn.Module):
    """Divides by a length and multiplies with a number: both are written into a graph."""

    def forward(self, x, scale=2.0):
        return x * scale / x.shape[1]


@pytest.mark.medium
@pytest.mark.parametrize("other", [(torch.ones(2, 5), 5.0), (torch.ones(2, 7), 3.0)], ids=["constant", "size"])
def test_compiled_code_serves_no_other_constants_and_sizes(other):
    example = torch.ones(2, 5), 3.0
    compiled = torch.compile(qtk.prepare_model(Scaled(), example), fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(4, 5), 3.0), Scaled()(torch.ones(4, 5), 3.0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="than when the model was captured"):
        compiled(*other)


@pytest.mark.medium
def test_compiled_code_serves_no_sizes_beyond_the_limits():
    prepared = qtk.prepare_model(Scaled(), torch.ones(6, 8))
    condition = "math.trunc(torch.sym_float(s0) / 2) > 2"
    prepared.meta[SIZES] = replace(prepared.sizes, limits=(SizeLimit(condition, (("s0", ("x", 0)),)),))
    prepared.recompile()
    for model in (prepared, copy.deepcopy(prepared)):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(compiled(torch.ones(7, 8)), torch.full((7, 8), 0.25))
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"only where math\.trunc\(.*\(x\.shape\[0\]\)"):
            compiled(torch.ones(3, 8))
