"""Simulations whose weights are quantized together are, bit for bit, those whose weights are quantized one by one."""

import copy
import io
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import qtk
from qtk.graph import weight_quantizers
from qtk.ops.fake_quantize import fake_quantize
from qtk.quantizers import shared_launch
from qtk.quantizers.quantizer import Mode


class Net(nn.Module):
    """Convolutions, a weight that two layers share, a layer that is called twice, two results."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.pointwise = nn.Conv2d(8, 8, 1)
        self.first, self.tied, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.tied.weight = self.first.weight

    def forward(self, x):
        x = self.pointwise(self.conv(x).relu()).mean((2, 3))
        x = self.tied(self.first(x).relu())
        return self.head(x), self.head(x.relu())


INPUT = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def simulation(**options):
    torch.manual_seed(0)
    sim = qtk.QuantSim(Net().eval(), INPUT, **options)
    sim.compute_encodings([INPUT], progress=False)
    return sim


@pytest.fixture
def launches(monkeypatch):
    """The number of tensors of every shared launch; the CPU shares launches."""
    counts = []

    def counted(xs, *spec):
        counts.append(len(xs))
        return [fake_quantize(*call) for call in zip(xs, *spec, strict=True)]

    monkeypatch.setattr(weight_quantizers, "shares_launches", lambda device: True)
    monkeypatch.setattr(shared_launch, "fake_quantize_many", counted)
    return counts


@pytest.fixture
def fetched(monkeypatch):
    """The number of results that quantizers have fetched."""
    counts = []
    real = shared_launch.with_value

    def counted(*args):
        counts.append(1)
        return real(*args)

    monkeypatch.setattr(shared_launch, "with_value", counted)
    return lambda: len(counts)


def outputs_and_gradients(model, call=None):
    """Of a step: results, gradients by name."""
    model.zero_grad()
    results = (call or model)(INPUT)
    (results[0].square().sum() + results[1].sum()).backward()
    return [*results, *(p.grad for p in model.parameters()), *(b for b in model.buffers())]


def same(own, other):
    return len(own) == len(other) and all(
        a is b is None or torch.equal(a, b) for a, b in zip(own, other, strict=True))


def one_by_one(monkeypatch, run):
    with monkeypatch.context() as patch:
        patch.setattr(weight_quantizers, "shares_launches", lambda device: False)
        return run()


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("options", [{}, {"weight_bits": 4}, {"activation_bits": None}], ids=str)
@pytest.mark.parametrize("train", [False, True])
def test_outputs_gradients_and_buffers_are_the_same_bits(train, options, launches, fetched, monkeypatch):
    sim = simulation(**options)
    sim.model.train(train)
    launches.clear()
    before = fetched()
    found = outputs_and_gradients(sim.model)
    assert launches == [4]
    assert fetched() - before == 4
    assert same(found, one_by_one(monkeypatch, lambda: outputs_and_gradients(sim.model)))
    with torch.no_grad():
        found = sim.model(INPUT)
        assert launches == [4, 4]
        assert same(found, one_by_one(monkeypatch, lambda: sim.model(INPUT)))
    with torch.inference_mode():
        assert same(sim.model(INPUT), found)


@pytest.mark.medium
def test_training_follows_the_same_path(launches, monkeypatch):
    def train():
        sim = simulation()
        optimizer = torch.optim.Adam(sim.model.parameters(), lr=0.01)
        for _ in range(3):
            outputs_and_gradients(sim.model)
            optimizer.step()
        return [*sim.model.state_dict().values()]

    assert same(train(), one_by_one(monkeypatch, train))


@pytest.mark.medium
def test_a_result_is_freed_with_its_layer_and_nothing_is_left_after_a_call(launches, monkeypatch):
    sim, left = simulation(), []
    quantizer = sim.quantizers["head.weight"]
    quantizer.register_forward_pre_hook(lambda *_: left.append(len(shared_launch._COMPUTED.get())))
    sim.model(INPUT)
    assert left[0] == 1  # its own: those of the layers before are gone
    assert shared_launch._COMPUTED.get() is None
    hook = quantizer.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sim.model(INPUT)
    hook.remove()
    assert shared_launch._COMPUTED.get() is None


def write(weight):
    with torch.no_grad():
        weight.mul_(2)


def swap_data(weight):
    weight.data = weight.data * 2


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("change", [write, swap_data])
def test_a_weight_that_a_hook_changes_in_the_call_is_quantized_as_it_is_then(change, launches, fetched, monkeypatch):
    sim = simulation()
    other = copy.deepcopy(sim.model)
    for model in (sim.model, other):
        early = model.get_submodule("qtk_quantizers.conv.weight")
        early.register_forward_pre_hook(lambda *_, model=model: change(model.head.weight))
    before = fetched()
    found = outputs_and_gradients(sim.model)
    assert fetched() - before == 3
    assert same(found, one_by_one(monkeypatch, lambda: outputs_and_gradients(other)))


@pytest.mark.medium
def test_weights_and_modules_that_were_replaced(launches, monkeypatch):
    sim = simulation()
    sim.model(INPUT)
    sim.model.head.weight = nn.Parameter(torch.randn(4, 8))
    assert same(sim.model(INPUT), one_by_one(monkeypatch, lambda: sim.model(INPUT)))
    sim.model.load_state_dict({key: value * 1.5 for key, value in sim.model.state_dict().items()})
    assert same(sim.model(INPUT), one_by_one(monkeypatch, lambda: sim.model(INPUT)))


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_that_was_moved(dtype, launches, monkeypatch):
    sim = simulation()
    sim.model(INPUT)
    sim.model.to(dtype)
    x = INPUT.to(dtype)
    assert same(sim.model(x), one_by_one(monkeypatch, lambda: sim.model(x)))


@pytest.mark.medium
def test_modes_are_those_of_each_quantizer(launches, monkeypatch):
    sim = simulation()
    sim.quantizers["head.weight"].mode = Mode.BYPASS
    sim.quantizers["conv.weight"].frozen = True
    launches.clear()
    found = outputs_and_gradients(sim.model)
    assert launches == [3]
    assert same(found, one_by_one(monkeypatch, lambda: outputs_and_gradients(sim.model)))


@pytest.mark.medium
def test_ranges_that_are_learned_or_move_are_left_to_their_quantizers(launches, monkeypatch):
    sim = simulation()
    sim.learn_ranges("*head.weight")
    sim.quantizers["conv.weight"].momentum = 0.5
    sim.model.train()
    launches.clear()
    other = copy.deepcopy(sim.model)
    found = outputs_and_gradients(sim.model)
    assert launches == [2]
    assert same(found, one_by_one(monkeypatch, lambda: outputs_and_gradients(other)))


@pytest.mark.medium
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_around_the_model(use_reentrant, launches, monkeypatch):
    sim = simulation()
    x = INPUT.clone().requires_grad_()

    def call(_):
        return checkpoint(sim.model, x, use_reentrant=use_reentrant)

    found = outputs_and_gradients(sim.model, call)
    assert same(found, one_by_one(monkeypatch, lambda: outputs_and_gradients(sim.model, call)))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_inside_of_the_model(use_reentrant, launches, fetched, monkeypatch):
    """The first run fetches what was computed before it, the second finds nothing: autograd must see the same."""
    sim = simulation()
    inner = sim.quantizers["head.weight"]
    real = type(inner).forward

    def forward(x):
        return checkpoint(lambda x: real(inner, x) * 1, x, use_reentrant=use_reentrant)

    inner.forward = forward
    before = fetched()
    found = outputs_and_gradients(sim.model)
    assert fetched() - before == 4
    assert same(found, one_by_one(monkeypatch, lambda: outputs_and_gradients(sim.model)))


@pytest.mark.medium
def test_each_result_keeps_a_graph_of_its_own(launches):
    """So that a part of a model can be trained, and gradients arrive as soon as they can."""
    sim = simulation()
    first, second = sim.model(INPUT)
    order = []
    for name in ("head.weight", "conv.weight"):
        sim.model.get_parameter(name).register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    torch.autograd.grad(first.sum(), sim.model.head.bias, retain_graph=True)
    (first.sum() + second.sum()).backward()
    assert order == ["head.weight", "conv.weight"]


def test_disjoint_graphs_are_freed_one_after_the_other(launches):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.left(x), self.right(x)

    x = torch.randn(2, 4)
    sim = qtk.QuantSim(Two().eval(), x)
    sim.compute_encodings([x], progress=False)
    launches.clear()
    left, right = sim.model(x)
    assert launches == [2]
    left.sum().backward()
    assert sim.model.right.weight.grad is None
    right.sum().backward()
    assert sim.model.right.weight.grad is not None


@pytest.mark.medium
def test_gradients_of_gradients(launches, monkeypatch):
    sim = simulation()

    def penalty():
        weights = [sim.model.conv.weight, sim.model.head.weight]
        loss = sum(result.square().sum() for result in sim.model(INPUT))
        first = torch.autograd.grad(loss, weights, create_graph=True)
        return [*first, *torch.autograd.grad(sum(each.square().sum() for each in first), weights)]

    assert same(penalty(), one_by_one(monkeypatch, penalty))


@pytest.mark.medium
def test_compiled_exported_and_traced_models_do_not_share(launches):
    sim = simulation()
    expected = sim.model(INPUT)
    launches.clear()
    compiled = torch.compile(sim.model, backend="aot_eager", fullgraph=True)
    for own, other in zip(compiled(INPUT), expected, strict=True):
        torch.testing.assert_close(own, other)
    assert same(torch.export.export(sim.model, (INPUT,)).module()(INPUT), expected)
    with FlopCounterMode(display=False):
        assert same(sim.model(INPUT), expected)
    assert launches == []


@pytest.mark.medium
def test_copies_and_checkpoints_of_the_model(launches, monkeypatch):
    sim = simulation()
    expected = sim.model(INPUT)
    copied = copy.deepcopy(sim.model)
    write(copied.head.weight)
    assert same(sim.model(INPUT), expected)
    assert same(copied(INPUT), one_by_one(monkeypatch, lambda: copied(INPUT)))
    assert not same(copied(INPUT), expected)
    file = io.BytesIO()
    torch.save(sim.model, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=False)(INPUT), expected)
    assert same(list(sim.model.state_dict().values()), list(copy.deepcopy(sim.model).state_dict().values()))


@pytest.mark.medium
def test_threads_do_not_take_each_others_results(launches):
    sim, wrong = simulation(), []
    expected = sim.model(INPUT)

    def run():
        with torch.no_grad():
            wrong.extend(1 for _ in range(20) if not same(sim.model(INPUT), expected))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.medium
def test_what_is_large_is_launched_alone(launches, monkeypatch):
    sim = simulation()
    monkeypatch.setattr(shared_launch, "LARGEST", 64)
    launches.clear()
    sim.model(INPUT)
    assert launches == [3]  # conv has 216 elements


@pytest.mark.medium
def test_a_pre_hook_of_the_model_may_change_weights_so_that_they_are_quantized_in_their_calls(launches):
    sim = simulation()
    sim.model.register_forward_pre_hook(lambda *_: None)
    launches.clear()
    sim.model(INPUT)
    assert launches == []


@pytest.mark.medium
def test_data_parallel_training_finds_every_gradient(launches, monkeypatch, tmp_path):
    sim = simulation()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(sim.model)
        launches.clear()
        found = outputs_and_gradients(sim.model, wrapped)
        assert launches == [4]
        assert same(found, one_by_one(monkeypatch, lambda: outputs_and_gradients(sim.model, wrapped)))
    finally:
        torch.distributed.destroy_process_group()
