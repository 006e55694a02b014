"""Training with batch norms that stay live behind layers quantized as folded, to the file that a runtime runs."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import update_bn

import qtk
from qtk.errors import CalibrationError
from qtk.runtimes.session import Optimizations, session_with
from qtk.transforms.keep_batch_norms import folded, is_kept
from tests.transforms.nets import InPython, randomized

AT_EXPORT = {"version": 1, "extends": "default", "fold_batch_norms": "at_export"}
ONNXRUNTIME = AT_EXPORT | {"extends": "onnxruntime"}
BATCHES = [torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def net():
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4),
    ]
    return randomized(nn.Sequential(*layers)).float()


def simulation(config=AT_EXPORT, **settings):
    sim = qtk.QuantSim(net(), BATCHES[0], config=config, **settings)
    sim.compute_encodings(BATCHES, progress=False)
    return sim


TARGET = torch.randn(8, 4, 4, 4, generator=torch.Generator().manual_seed(5))
"""The sum of squares of a normalised output would not depend on the weights."""


def train(sim, model=None, steps=3, lr=1e-2):
    """Some steps of SGD in train mode. Returns: the losses."""
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=lr)
    losses = []
    sim.model.train()
    for step in range(steps):
        loss = (sim.model if model is None else model)(BATCHES[step % len(BATCHES)]).sub(TARGET).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def same_bits(some, others):
    assert list(some) == list(others)
    assert all(torch.equal(some[name], others[name]) for name in some)


class BruteForce:
    """The same net in float64, with the straight-through estimator and batch norms written out."""

    def __init__(self, sim):
        self.encodings = sim.encodings()
        self.bias_encodings = {name: q.encoding for name, q in sim.quantizers.items() if name.endswith("bias")}
        model = sim.model
        self.parameters = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
        self.buffers = {name: b.detach().double() for name, b in model.named_buffers() if "running" in name}
        self.statistics = {}

    def quantized(self, x, name):
        encoding = self.bias_encodings.get(name) or self.encodings.get(name)
        if encoding is None:
            return x
        scale, zero = encoding.scale.double(), 0 if encoding.zero_point is None else encoding.zero_point.double()
        if scale.numel() > 1:
            scale = scale.reshape(-1, *[1] * (x.ndim - 1))
        codes = torch.round(x / scale) + zero
        inside = (codes >= encoding.spec.qmin) & (codes <= encoding.spec.qmax)
        result = ((codes.clamp(encoding.spec.qmin, encoding.spec.qmax) - zero) * scale).detach()
        return torch.where(inside, x + (result - x).detach(), result)

    def layer(self, x, conv, norm, train, **arguments):
        weight, bias = self.parameters[f"{conv}.weight"], self.parameters.get(f"{conv}.bias", torch.zeros(()))
        gamma, beta = self.parameters[f"{norm}.weight"], self.parameters[f"{norm}.bias"]
        mean, var = self.buffers[f"{norm}.running_mean"], self.buffers[f"{norm}.running_var"]
        scale = gamma / (var + 1e-5).sqrt()
        rounded = self.quantized(weight * scale.reshape(-1, 1, 1, 1), f"{conv}.weight")
        if not train:
            shift = self.quantized(bias * scale + beta - mean * scale, f"{conv}.bias")
            return F.conv2d(x, rounded, shift, **arguments)
        channels = [rounded[i] / scale[i] if gamma[i] != 0 else weight[i] for i in range(len(gamma))]
        y = F.conv2d(x, torch.stack(channels), **arguments) + bias.reshape(1, -1, 1, 1)
        batch_mean = y.mean((0, 2, 3), keepdim=True)
        centred = y - batch_mean
        batch_var = centred.square().mean((0, 2, 3), keepdim=True)
        count = y.numel() / y.shape[1]
        self.statistics[norm] = batch_mean.flatten().detach(), (batch_var * count / (count - 1)).flatten().detach()
        return gamma.reshape(1, -1, 1, 1) * centred / (batch_var + 1e-5).sqrt() + beta.reshape(1, -1, 1, 1)

    def __call__(self, x, train):
        x = self.quantized(x.double(), "input:input")
        x = self.quantized(F.relu(self.layer(x, "0", "1", train)), "2:out")
        x = self.quantized(F.relu(self.layer(x, "3", "4", train, padding=1, groups=8)), "5:out")
        return self.quantized(self.layer(x, "6", "7", train), "6:out")


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("config", [AT_EXPORT, ONNXRUNTIME], ids=["default", "onnxruntime"])
def test_outputs_and_gradients_are_those_of_brute_force(config, training, zero):
    model = net()
    if zero:
        with torch.no_grad():
            model[1].weight[2] = model[7].weight[0] = 0.0
    sim = qtk.QuantSim(model, BATCHES[0], config=config, weight_bits=4)
    sim.compute_encodings(BATCHES, progress=False)
    sim.model.train(training)
    reference = BruteForce(sim)
    expected = reference(BATCHES[1], training)
    output = sim.model(BATCHES[1])
    step = sim.encodings()["6:out"].scale
    assert float(((output - expected).abs() > step / 2).double().mean()) < 2e-3  # a rounding may fall the other way
    (output * TARGET).sum().backward()
    (expected * TARGET.double()).sum().backward()
    largest = max(float(parameter.grad.abs().max()) for parameter in reference.parameters.values())
    for name, parameter in sim.model.named_parameters():
        exact = reference.parameters[name].grad
        if training and name in ("3.bias", "6.bias"):  # a batch norm takes its mean out
            assert float(parameter.grad.abs().max()) < 1e-5 * largest
        else:
            torch.testing.assert_close(parameter.grad.double(), exact, rtol=2e-3, atol=2e-3 * float(exact.abs().max()))
    for norm, (mean, var) in reference.statistics.items():
        for name, batch in ((f"{norm}.running_mean", mean), (f"{norm}.running_var", var)):
            moved = 0.9 * reference.buffers[name] + 0.1 * batch
            torch.testing.assert_close(sim.model.get_buffer(name).double(), moved, rtol=1e-3, atol=1e-4)


@pytest.mark.medium
def test_the_batch_normalises_but_does_not_move_the_codes_of_the_weight():
    """Folding by the statistics of each batch, the plainest way to train a folded weight, moves them every time."""
    sim = simulation(weight_bits=8)
    norm, conv = sim.model.get_submodule("1"), sim.model.get_parameter("0.weight").detach()
    norm.momentum = 0.0
    seen = []
    sim.quantizers["0.weight"].register_forward_hook(lambda *call: seen.append(call[2].detach().clone()))
    sim.model.train()
    outputs = [sim.model(batch) for batch in (BATCHES[0], BATCHES[1], BATCHES[0] + 3)]
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(outputs[0], outputs[2])
    scale = sim.encodings()["0.weight"].scale.reshape(-1, 1, 1, 1)
    codes = []
    for batch in BATCHES[:2]:
        var = F.conv2d(batch, conv).var((0, 2, 3), unbiased=False)
        factor = norm.weight.detach() / (var + norm.eps).sqrt()
        codes.append(torch.round(conv * factor.reshape(-1, 1, 1, 1) / scale))
    assert float((codes[0] != codes[1]).double().mean()) > 0.3


@pytest.mark.medium
def test_running_statistics_do_not_reach_the_output_in_train_mode_but_through_rounding():
    sim = simulation(weight_bits=None, activation_bits=8)
    sim.model.train()
    before = sim.model(BATCHES[0])
    sim.model.get_buffer("1.running_var").mul_(7.0)
    sim.model.get_buffer("1.running_mean").add_(7.0)
    assert float((sim.model(BATCHES[0]) - before).detach().abs().max()) <= 1.01 * float(sim.encodings()["6:out"].scale)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("config", [AT_EXPORT, ONNXRUNTIME], ids=["default", "onnxruntime"])
def test_what_was_trained_is_what_is_exported(config, tmp_path):
    """Codes of the file are those of the simulation; unoptimized, ONNX Runtime computes the same to rounding."""
    pytest.importorskip("onnxruntime")
    from qtk.export.onnx.stored_sites import stored_sites

    sim = simulation(config)
    train(sim)
    sim.model.eval()
    expected, state = sim.model(BATCHES[2]), copy.deepcopy(sim.model.state_dict())
    sim.export(tmp_path / "sim")
    assert is_kept(sim.model)
    same_bits(sim.model.state_dict(), state)
    assert torch.equal(sim.model(BATCHES[2]), expected)
    simulated = {}
    for name, quantizer in sim.quantizers.items():
        quantizer.register_forward_hook(lambda *call, name=name: simulated.update({name: call[2].detach()}))
    sim.model(BATCHES[2])
    constants = {site.name: site.constant() for site in stored_sites(tmp_path / "sim" / "model.onnx")}
    stored = {name: constant for name, constant in constants.items() if constant is not None}
    assert {"0.weight", "3.weight", "6.weight"} <= stored.keys()
    assert ("0.bias" in stored) == (config is ONNXRUNTIME)
    assert all(torch.equal(constant, simulated[name].reshape(constant.shape)) for name, constant in stored.items())
    verdict = sim.verify_export(tmp_path / "sim", BATCHES, turns=1, progress=False)
    assert verdict.runs[0].max_difference_scales <= 1.01
    assert verdict.runs[0].differing < 1e-3


@pytest.mark.slow
def test_digits_trained_live_have_the_same_accuracy_in_onnx_runtime(tmp_path):
    pytest.importorskip("sklearn")
    from qtk.demo.digits import load_digits_split
    from qtk.demo.models import build

    digits = load_digits_split()
    sim = qtk.QuantSim(build("digits_cnn"), digits.train_images[:8], weight_bits=4, config=ONNXRUNTIME)
    sim.compute_encodings(digits.train_images[:256].split(64), progress=False)
    schedule = qtk.QatSchedule(sim, learn_ranges_from=10, freeze_batch_norms_at=40)
    optimizer = torch.optim.Adam([{"params": sim.weight_parameters()}, {"params": sim.range_parameters()}], lr=1e-3)
    torch.manual_seed(0)
    for _ in range(3):
        sim.model.train()
        for rows in torch.randperm(len(digits.train_images)).split(64):
            schedule.step()
            optimizer.zero_grad()
            F.cross_entropy(sim.model(digits.train_images[rows]), digits.train_labels[rows]).backward()
            optimizer.step()
    sim.model.eval()
    with torch.no_grad():
        expected = sim.model(digits.test_images).argmax(1)
    assert float((expected == digits.test_labels).double().mean()) > 0.97
    sim.export(tmp_path / "digits", formats="onnx")
    session, _ = session_with(tmp_path / "digits" / "model.onnx", Optimizations.EXACT)
    (name,) = (each.name for each in session.get_inputs())
    (scores,) = session.run(None, {name: digits.test_images.numpy()})
    assert torch.equal(torch.from_numpy(scores).argmax(1), expected)


@pytest.mark.medium
def test_frozen_batch_norms_compute_the_folded_layer():
    """A schedule, ``.eval()`` of the module, or a frozen one in its place; γ and β still learn."""
    sim = simulation(ONNXRUNTIME)
    train(sim)
    schedule = qtk.QatSchedule(sim, freeze_batch_norms_at=0)
    sim.model.train()
    schedule.step()
    statistics = sim.model.get_buffer("4.running_mean").clone()
    output = sim.model(BATCHES[1])
    assert torch.equal(sim.model.get_buffer("4.running_mean"), statistics)
    output.square().sum().backward()
    assert float(sim.model.get_parameter("4.weight").grad.abs().max()) > 0
    assert torch.equal(sim.model.eval()(BATCHES[1]), output)
    with folded(sim.simulation) as deployed:
        assert torch.equal(deployed.model(BATCHES[1]), output)


@pytest.mark.medium
def test_ranges_of_weights_are_learned_and_follow_the_folded_weight():
    sim = simulation()
    sim.learn_ranges("*.weight")
    train(sim)
    assert all(float((q.scale_factor - 1).abs().max()) > 0 for name, q in sim.quantizers.items() if "weight" in name)
    sim.model.eval()
    before = sim.model(BATCHES[0])
    qtk.fold_batch_norms(sim)
    assert torch.equal(sim.model(BATCHES[0]), before)
    sim = simulation()
    sim.track_weights("*.weight")
    with torch.no_grad():
        sim.model.get_parameter("1.weight").mul_(3.0)
    before = sim.encodings()["0.weight"].scale
    sim.model.train()
    sim.model(BATCHES[0])
    torch.testing.assert_close(sim.encodings()["0.weight"].scale, 3 * before)


@pytest.mark.medium
def test_copies_pickles_state_dicts_and_files_hold_the_same(tmp_path):
    sim = simulation(ONNXRUNTIME)
    sim.learn_ranges()
    train(sim)
    sim.save(tmp_path / "sim")
    loaded = qtk.QuantSim.load(tmp_path / "sim", net(), BATCHES[0])
    assert is_kept(loaded.model)
    fresh = simulation(ONNXRUNTIME)
    fresh.model.load_state_dict(sim.model.state_dict())
    copies = [copy.deepcopy(sim.model), pickle.loads(pickle.dumps(sim.model)), loaded.model, fresh.model]
    for model in copies:
        same_bits(model.state_dict(), sim.model.state_dict())
        assert torch.equal(model.eval()(BATCHES[0]), sim.model.eval()(BATCHES[0]))
        states = []
        for each in (model.train(), sim.model.train()):
            state = copy.deepcopy(each.state_dict())
            output = each(BATCHES[0])
            gradients = torch.autograd.grad((output * TARGET).sum(), list(each.parameters()), allow_unused=True)
            states.append([output, *gradients, *(value.clone() for value in each.state_dict().values())])
            each.load_state_dict(state)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*states, strict=True))
    qtk.fold_batch_norms(sim)
    sim.save(tmp_path / "folded")
    loaded = qtk.QuantSim.load(tmp_path / "folded", net(), BATCHES[0])
    assert torch.equal(loaded.model.eval()(BATCHES[0]), sim.model.eval()(BATCHES[0]))


@pytest.mark.medium
def test_a_float_checkpoint_loads_live_and_folded():
    live, after, trained = simulation(), simulation(), net()
    qtk.fold_batch_norms(after)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    for sim in (live, after):
        sim.load_float_state_dict(trained.state_dict())
        sim.compute_encodings(BATCHES, progress=False)
    assert torch.equal(live.model(BATCHES[0]), after.model(BATCHES[0]))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("blocks", [["0", "3"], ["6"]])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_block_view_computes_the_same_also_a_second_time(blocks, checkpoint):
    found = []
    for cut in (False, True):
        sim = simulation()
        model = qtk.block_view(sim, blocks, checkpoint=checkpoint) if cut else sim.model
        losses = train(sim, model)
        found.append([*losses, *sim.model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x):
        return self.body(x)


@pytest.mark.medium
def test_recomputing_layer_and_batch_norm_together_uses_the_statistics_of_the_first_time():
    found = []
    for cut in (False, True):
        torch.manual_seed(0)
        sim = qtk.QuantSim(Stage().eval(), BATCHES[0], config=AT_EXPORT, weight_bits=4)
        sim.compute_encodings(BATCHES, progress=False)
        model = qtk.block_view(sim, "body", checkpoint=True) if cut else sim.model
        found.append([*train(sim, model), *sim.model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_step_is_the_eager_one(backend, training):
    """Also its gradients, for which compilers compute weights again after the statistics were updated."""
    torch.compiler.reset()
    sim = simulation()
    sim.model.train(training)
    compiled = torch.compile(sim.model, fullgraph=True, backend=backend)
    found = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for model in (sim.model, compiled):
            state = copy.deepcopy(sim.model.state_dict())
            for batch in BATCHES:
                sim.model.zero_grad()
                (model(batch) * TARGET).sum().backward()
            found.append([value.clone() for value in (*(p.grad for p in sim.model.parameters()),
                                                      *sim.model.state_dict().values())])
            sim.model.load_state_dict(state)
    torch.compiler.reset()
    for eager, own in zip(*found, strict=True):
        torch.testing.assert_close(own, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.medium
def test_reestimated_statistics_are_those_of_the_codes_which_stay():
    sim = simulation(weight_bits=2)
    train(sim, steps=1)
    sim.model.eval()
    q = sim.quantizers["3.weight"]
    seen = []
    handle = q.register_forward_hook(  # a calibration runs the weight in float
        lambda *call: seen.append(torch.round(call[2] / q.scale.reshape(-1, 1, 1, 1)).clamp(-2, 1)))
    sim.model(BATCHES[0])
    before = sim.model.get_buffer("4.running_var").clone()
    result = qtk.reestimate_batch_norms(sim, BATCHES, progress=False)
    assert [group.name for group in result.applied] == ["1", "4", "7"]
    assert not torch.allclose(sim.model.get_buffer("4.running_var"), before, rtol=1e-2)
    sim.compute_encodings(BATCHES, only_missing=True, progress=False)
    sim.model(BATCHES[0])
    handle.remove()
    assert all(torch.equal(codes, seen[0]) for codes in seen)
    again = copy.deepcopy(sim.model.state_dict())
    qtk.reestimate_batch_norms(sim, BATCHES, progress=False)  # nothing was trained since
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(sim.model.get_buffer(name), again[name])
    assert not any(module.training for module in sim.model.modules())


@pytest.mark.medium
def test_what_acts_by_the_type_of_a_batch_norm_acts():
    sim = simulation()
    norms = [module for module in sim.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 3
    before = sim.model.get_buffer("7.running_mean").clone()
    update_bn([batch + 1 for batch in BATCHES], sim.model)
    assert not torch.equal(sim.model.get_buffer("7.running_mean"), before)
    expected = sim.model.eval()(BATCHES[0])
    calls = []
    norms[1].register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(sim.model(BATCHES[0]), expected)
    assert calls == [1]
    norms[1]._forward_hooks.clear()
    timm = pytest.importorskip("timm.utils.model")
    timm.freeze_batch_norm_2d(sim.model)
    sim.model.train()
    assert torch.equal(sim.model(BATCHES[0]), expected)
    assert sum(type(module).__name__ == "FrozenBatchNorm2d" for module in sim.model.modules()) == 3


@pytest.mark.slow
def test_islands_are_trained_live_and_exported(tmp_path):
    pytest.importorskip("onnxruntime")
    x = torch.randn(2, 4, 6, 6)
    sim = qtk.QuantSim(randomized(InPython()).float(), x, config=ONNXRUNTIME)
    sim.compute_encodings([x], progress=False)
    sim.model.train()
    sim.model(x).sum().backward()
    sim.model.eval()
    before = sim.model(x)
    sim.export(tmp_path / "islands")
    assert sim.verify_export(tmp_path / "islands", [x], turns=0, progress=False).runs[0].differing < 1e-3
    qtk.fold_batch_norms(sim)
    assert torch.equal(sim.model(x), before)


@pytest.mark.medium
def test_methods_that_set_weights_ask_for_folded_ones():
    sim = simulation()
    with pytest.raises(CalibrationError, match=r"live batch norms.*fold_batch_norms\(sim\) first"):
        qtk.apply_gptq(sim, BATCHES, progress=False)
    qtk.fold_batch_norms(sim)
    qtk.apply_gptq(sim, BATCHES, progress=False)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("transform", [qtk.equalize_model, lambda sim: qtk.apply_smooth_quant(sim, BATCHES)])
def test_transforms_of_weights_ask_for_folded_ones(transform):
    sim = simulation()
    with pytest.raises(CalibrationError, match=r"live batch norms.*fold_batch_norms\(sim\) first"):
        transform(sim)
    qtk.fold_batch_norms(sim)
    transform(sim)
