import copy
import math

import pytest
import torch
from torch import fx, nn

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS, build
from qtk.demo.train import top1
from qtk.errors import ArgumentError, CalibrationError, CaptureError, ConfigError, QtkError
from qtk.graph.insert import remove
from qtk.numerics.error import sqnr_db
from tests.zoo.prepared import slow_but

BLOCKS, WIDTH = 2, 32


class SpelledGelu(nn.Module):
    """GELU of small ops, whose 0.5 is a buffer that all blocks share."""

    def __init__(self, half):
        super().__init__()
        self.register_buffer("constant", half)

    def forward(self, x):
        return x * self.constant * (1 + torch.erf(x / math.sqrt(2)))


class Block(nn.Module):
    def __init__(self, half):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = SpelledGelu(half)
        with torch.no_grad():
            self.fc1.weight[[3, 17]] *= 80
            self.fc2.weight[:, [3, 17]] /= 80

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class SpelledVit(nn.Module):
    def __init__(self):
        super().__init__()
        half = torch.tensor(0.5)
        self.blocks = nn.Sequential(*(Block(half) for _ in range(BLOCKS)))

    def forward(self, x):
        return self.blocks(x)


def spelled(how):
    torch.manual_seed(0)
    model, data = SpelledVit().eval(), list(torch.randn(6, 8, 16, WIDTH).unbind())
    if how == "as written":
        return model, data
    program = torch.export.export(model, (data[0],)).run_decompositions()
    exported = program.module(check_guards=False)
    return fx.GraphModule(exported, exported.graph), data  # of which the type can be switched to eval mode


def simulation_db(sim, data, reference):
    sim.compute_encodings(data, progress=False)
    with torch.no_grad():
        return sqnr_db(reference, sim.model(data[0]))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("how", ["as written", "decomposed"])
def test_a_gelu_of_small_ops_with_one_shared_constant(how):
    model, data = spelled(how)
    with torch.no_grad():
        reference = model(data[0])
    before = simulation_db(qtk.QuantSim(model, data[0]), data, reference)
    sim = qtk.QuantSim(model, data[0])
    supergroups = [reason for reason in sim.plan.unquantized.values() if "supergroup" in reason or "gelu" in reason]
    assert any("gelu" in reason for reason in supergroups)
    halves = [name for name, buffer in sim.model.named_buffers() if buffer.numel() == 1 and float(buffer) == 0.5]
    assert halves
    result = qtk.apply_smooth_quant(sim, data, progress=False)
    inserted = [group for group in result.applied if "multiplication" in group.detail]
    assert len(inserted) == BLOCKS
    assert not result.undone
    assert all(torch.equal(sim.model.get_buffer(name), torch.tensor(0.5)) for name in halves)
    reasons = list(sim.plan.unquantized.values())
    assert [reason for reason in reasons if "supergroup" in reason or "gelu" in reason] == supergroups
    assert reasons.count("scaled per channel first") == BLOCKS
    assert simulation_db(sim, data, reference) > before + 10
    remove(sim.model)
    with torch.no_grad():
        assert torch.allclose(sim.model(data[0]), reference, atol=1e-5 * float(reference.abs().max()))


@pytest.fixture(scope="module")
def digits():
    split = load_digits_split()
    return split, list(torch.split(split.train_images[:512], 64))


def with_outliers(model):
    """Two channels of every norm × 80, and the weights that read them / 80: the same function."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for block in model.blocks:
            for norm, layer in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp[0])):
                norm.weight[[3, 17]] *= 80
                norm.bias[[3, 17]] *= 80
                layer.weight[:, [3, 17]] /= 80
    return model


def simulated(model, digits, smooth):
    split, batches = digits
    sim = qtk.QuantSim(model, batches[0])
    if smooth:
        qtk.apply_smooth_quant(sim, batches, progress=False)
    sim.compute_encodings(batches, progress=False)
    with torch.no_grad():
        db = sqnr_db(model(split.test_images), sim.model(split.test_images))
    return top1(sim.model, split.test_images, split.test_labels), db


@pytest.mark.slow
def test_digits_vit_with_outliers_is_accurate_again(digits):
    model = with_outliers(build("digits_vit"))
    plain, smooth = simulated(model, digits, False), simulated(model, digits, True)
    assert plain[0] < 0.95
    assert smooth[0] >= 0.992
    assert smooth[1] >= plain[1] + 10


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(DEMO_MODELS, "digits_cnn", "digits_gru"))
def test_models_without_outliers_lose_nothing(name, digits):
    model = build(name)
    assert simulated(model, digits, True)[1] >= simulated(model, digits, False)[1] - 0.1


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)).eval()
    with torch.no_grad():
        model[0].weight[:2] *= 80
    return model, list(torch.randn(4, 16, WIDTH).unbind())


def fingerprint(sim):
    """Everything that an error must leave as it was."""
    held = {**dict(sim.model.named_parameters()), **dict(sim.model.named_buffers())}
    return (
        {name: (id(held.get(name)), value.clone()) for name, value in sim.model.state_dict(keep_vars=True).items()},
        str(sim.plan), sim.model.code, {name: str(encoding) for name, encoding in sim.encodings().items()},
    )


def same(before, after):
    return before[1:] == after[1:] and before[0].keys() == after[0].keys() and all(
        a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(before[0].values(), after[0].values(), strict=True))


NAN = torch.full((16, WIDTH), torch.nan)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("error", "message", "data", "settings"),
    [
        (ConfigError, r"alpha must be a number from 0 to 1, or 'auto'; got 1.5", None, {"alpha": 1.5}),
        (ConfigError, "got -0.1", None, {"alpha": -0.1}),
        (ConfigError, "got nan", None, {"alpha": math.nan}),
        (ArgumentError, "got 'best'", None, {"alpha": "best"}),
        (ArgumentError, "got True", None, {"alpha": True}),
        (CalibrationError, "batch 1: .*: NaN or infinity in the data", [torch.randn(16, WIDTH), NAN], {}),
        (QtkError, "batch 0", [torch.randn(16, WIDTH + 1)], {}),
        (CalibrationError, "no batches", [], {}),
        (CalibrationError, "num_batches must be at least 1", None, {"num_batches": 0}),
        (CalibrationError, "data must be an iterable", 7, {}),
        (CalibrationError, "does not run as", [{"other": torch.randn(16, WIDTH)}], {}),
    ],
)
def test_bad_input_changes_nothing(error, message, data, settings):
    model, batches = small()
    sim = qtk.QuantSim(model, batches[0])
    sim.compute_encodings(batches, progress=False)
    before = fingerprint(sim)
    with pytest.raises(error, match=message):
        qtk.apply_smooth_quant(sim, batches if data is None else data, progress=False, **settings)
    assert same(before, fingerprint(sim))


@pytest.mark.medium
def test_an_interruption_changes_nothing():
    model, batches = small()
    sim = qtk.QuantSim(model, batches[0])
    before = fingerprint(sim)

    def interrupted(model):
        model(batches[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qtk.apply_smooth_quant(sim, interrupted, progress=False)
    assert same(before, fingerprint(sim))


@pytest.mark.medium
def test_what_is_in_the_way_is_named():
    model, batches = small()
    for site in ("1.weight", "0:out"):
        sim = qtk.QuantSim(model, batches[0])
        sim.compute_encodings(batches, progress=False)
        sim.freeze(site)
        before = fingerprint(sim)
        with pytest.raises(CalibrationError, match=rf"^{site} would be rewritten"):
            qtk.apply_smooth_quant(sim, batches, progress=False)
        assert same(before, fingerprint(sim))


@pytest.mark.medium
def test_rounded_weights_are_in_the_way_even_when_unfrozen():
    model, batches = small()
    sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    qtk.apply_gptq(sim, batches, progress=False)
    sim.unfreeze()
    with pytest.raises(CalibrationError, match="rounded; transform before layer-wise methods"):
        qtk.apply_smooth_quant(sim, batches, progress=False)


def test_no_simulation():
    model, batches = small()
    with pytest.raises(CalibrationError, match="needs the plan of a QuantSim, got GraphModule"):
        qtk.apply_smooth_quant(qtk.prepare_model(model, batches[0]), batches)


def test_several_processes(monkeypatch):
    model, batches = small()
    sim = qtk.QuantSim(model, batches[0])
    monkeypatch.setattr("qtk.workflow.smooth_quant.several_ranks", lambda: True)
    with pytest.raises(CalibrationError, match="runs in one process"):
        qtk.apply_smooth_quant(sim, batches, progress=False)


def test_a_model_without_layers():
    sim = qtk.QuantSim(nn.Sequential(nn.ReLU(), nn.Sigmoid()).eval(), torch.randn(4, 8))
    result = qtk.apply_smooth_quant(sim, [torch.randn(4, 8)], progress=False)
    assert str(result) == "smooth_quant: the model has no layer with a weight"


@pytest.mark.medium
def test_encodings_that_still_fit_are_kept():
    model, batches = small()
    sim = qtk.QuantSim(model, batches[0])
    sim.compute_encodings(batches, progress=False)
    before = sim.encodings()
    result = qtk.apply_smooth_quant(sim, batches, alpha=0.5, progress=False)
    assert len(result.applied) == 2
    assert list(sim.encodings()) == ["input:input", "3:out"]
    assert torch.equal(sim.encodings()["3:out"].scale, before["3:out"].scale)
    sim.compute_encodings(batches, only_missing=True, progress=False)
    sim.check()


@pytest.mark.medium
def test_data_as_a_function_pairs_and_dicts():
    model, batches = small()
    results = []
    for data, forward in (
        (batches, None),
        (lambda model: [model(x) for x in batches], None),
        ([(x, 0) for x in batches], lambda model, batch: model(batch[0])),
        ([{"input": x} for x in batches], None),
    ):
        sim = qtk.QuantSim(model, batches[0])
        qtk.apply_smooth_quant(sim, data, forward=forward, progress=False)
        results.append(sim.model.get_parameter("1.weight"))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.medium
def test_a_single_sample_says_that_nothing_was_held_out():
    model, batches = small()
    sim = qtk.QuantSim(model, batches[0][:1])
    result = qtk.apply_smooth_quant(sim, [batches[0][:1]], alpha=0.5, progress=False)
    assert all("cannot be divided" in group.detail for group in result.applied)


@pytest.mark.medium
def test_the_second_time_there_is_little_left_to_gain():
    model, batches = small()
    sim = qtk.QuantSim(model, batches[0])
    first, second = (qtk.apply_smooth_quant(sim, batches, progress=False) for _ in range(2))
    assert first.groups[0].after < first.groups[0].before / 10
    assert all(group.after > group.before / 1.25 for group in second.groups)


@pytest.mark.medium
def test_saved_and_loaded_with_an_inserted_multiplication(tmp_path):
    model, data = spelled("as written")
    sim = qtk.QuantSim(model, data[0])
    qtk.apply_smooth_quant(sim, data, progress=False)
    sim.compute_encodings(data, progress=False)
    sim.save(tmp_path / "sim")
    again = qtk.QuantSim.load(tmp_path / "sim", SpelledVit().eval(), data[0])
    with torch.no_grad():
        assert torch.equal(again.model(data[0]), sim.model(data[0]))


@pytest.mark.medium
def test_a_float_checkpoint_is_smoothed_as_the_model_was():
    model, data = spelled("as written")
    sim = qtk.QuantSim(model, data[0])
    qtk.apply_smooth_quant(sim, data, progress=False)
    trained = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.1)
    sim.load_float_state_dict(trained.state_dict())
    remove(sim.model)
    with torch.no_grad():
        expected = trained(data[0])
        assert torch.allclose(sim.model(data[0]), expected, atol=1e-5 * float(expected.abs().max()))


def test_captured_for_one_shape():
    model, batches = small()
    sim = qtk.QuantSim(qtk.prepare_model(model, batches[0], dynamic_shapes=None), batches[0])
    with pytest.raises(CaptureError, match=r"batch 0: .*has shape"):
        qtk.apply_smooth_quant(sim, [torch.randn(3, WIDTH)], progress=False)


class OfTokens(nn.Module):
    """Two layers on tokens, of which those that a mask leaves out may be anything."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel
        self.first = nn.Conv1d(8, 8, 1) if kernel else nn.Linear(8, 8)
        self.second = nn.Conv1d(8, 4, kernel) if kernel else nn.Linear(8, 4)

    def forward(self, x, mask):
        x = x.transpose(1, 2) if self.kernel else x
        return self.second(self.first(x)).sum() + mask.sum()


def smoothed_tokens(kernel, fill, valid, alpha):
    torch.manual_seed(0)
    model, mask = OfTokens(kernel).eval(), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    x = [torch.where(mask[..., None] == 1, torch.randn(2, 5, 8), fill) for _ in range(3)]
    sim = qtk.QuantSim(model, (x[0], mask), config="default")
    qtk.apply_smooth_quant(sim, [(each, mask) for each in x], alpha=alpha, valid=valid, progress=False)
    return {name: each.detach() for name, each in sim.model.named_parameters()}, model, x, mask


@pytest.mark.medium
@pytest.mark.parametrize(("kernel", "alpha"), [(0, 0.5), (3, 0.5), pytest.param(0, "auto", marks=pytest.mark.slow)])
def test_padding_leaves_no_trace_in_scales(kernel, alpha):
    quiet, loud, all_rows = (smoothed_tokens(kernel, *each, alpha) for each in (
        (0.0, "mask"), (1e4, "mask"), (1e4, None)))
    for name, parameter in quiet[0].items():
        assert torch.equal(parameter, loud[0][name]), name
    assert not torch.allclose(all_rows[0]["second.weight"], loud[0]["second.weight"], rtol=0.05)
    if alpha == "auto":
        return
    parameters, model, x, mask = loud
    with torch.no_grad():  # of the batches that are not held out
        tokens = torch.cat([x[0][mask == 1], x[2][mask == 1]]).double()
        weight = model.first.weight.double().reshape(8, 8)
        largest = (tokens @ weight.T + model.first.bias.double()).abs().amax(0)
        of_second = model.second.weight.double().abs().reshape(4, 8, -1).amax((0, 2))
        scale = (largest / of_second).sqrt()
        scale *= (largest / scale).max() / largest.max()  # which keeps the largest input
    torch.testing.assert_close(parameters["first.weight"].reshape(8, 8), (weight / scale[:, None]).float())
