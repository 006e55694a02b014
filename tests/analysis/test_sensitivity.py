import math

import pytest
import torch
from torch import nn

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS, build
from qtk.errors import CalibrationError
from qtk.quantizers.modes import in_mode


@pytest.fixture(scope="module")
def digits():
    images = load_digits_split().train_images[:256]
    sim = qtk.QuantSim(build("digits_cnn"), images[:8])
    sim.compute_encodings(images.split(64), progress=False)
    return sim, list(images.split(64))


def ranks(values):
    return torch.tensor(values).argsort().argsort().double()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("with_loss", [False, True])
def test_the_order_by_gradients_is_that_of_measurement(digits, with_loss):
    sim, batches = digits
    labels = {id(batch): sim.model(batch).argmax(1) for batch in batches}

    def loss(output, batch):
        return nn.functional.cross_entropy(output, labels[id(batch)])

    rows = sim.sensitivity(batches, loss=loss if with_loss else None, top=1000, progress=False)
    assert all(row.exact for row in rows)
    estimated, measured = ([getattr(row, name) for row in rows] for name in ("estimated_increase", "increase"))
    assert float(torch.corrcoef(torch.stack([ranks(estimated), ranks(measured)]))[0, 1]) > 0.9
    if not with_loss:
        assert sum(estimated) == pytest.approx(sum(measured), rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", DEMO_MODELS)
def test_the_order_is_that_of_measurement_on_every_digits_model(name, bits):
    batches = list(load_digits_split().train_images[:512].split(64))
    sim = qtk.QuantSim(build(name), batches[0], weight_bits=bits, activation_bits=bits)
    sim.compute_encodings(batches, progress=False)
    rows = sim.sensitivity(batches, top=1000, progress=False)
    estimated, measured = ([getattr(row, column) for row in rows] for column in ("estimated_increase", "increase"))
    assert float(torch.corrcoef(torch.stack([ranks(estimated), ranks(measured)]))[0, 1]) > 0.9


@pytest.mark.medium
def test_what_is_measured_is_the_error_of_two_separate_runs(digits):
    sim, batches = digits
    row = sim.sensitivity(batches, top=1, progress=False)[0]
    quantizer, images = sim.quantizers[row.name], torch.cat(batches)
    with torch.no_grad():
        simulated = sim.model(images).double()
        with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
            reference = sim.model(images).double()
            with in_mode([quantizer], qtk.Mode.SIMULATE):
                alone = sim.model(images).double()
        with in_mode([quantizer], qtk.Mode.BYPASS):
            without = sim.model(images).double()
    power = reference.square().sum()
    assert row.increase == pytest.approx(float((alone - reference).square().sum() / power), rel=1e-3)
    recovered = (simulated - reference).square().sum() - (without - reference).square().sum()
    assert row.recovery == pytest.approx(float(recovered / power), rel=1e-3)


def test_a_planted_fault_is_first(digits):
    sim, batches = digits
    encoding = sim.encodings()["stem.0.weight"]
    sim.quantizers["stem.0.weight"].load_encoding(qtk.Encoding(encoding.spec, encoding.scale * 0.5))
    try:
        rows = sim.sensitivity(iter(batches), top=0, progress=False)
    finally:
        sim.quantizers["stem.0.weight"].load_encoding(encoding)
    assert rows[0].name == "stem.0.weight"
    assert math.isnan(rows[0].recovery)


@pytest.mark.medium
def test_groups_are_switched_together(digits):
    sim, batches = digits
    rows = {row.name: row for row in sim.sensitivity(batches, groups="blocks.*", top=0, progress=False)}
    alone = {row.name: row for row in sim.sensitivity(batches, top=0, progress=False)}
    assert "blocks.0" in rows
    assert len(rows["blocks.0"].sites) > 1
    assert {site for row in rows.values() for site in row.sites} == set(alone)
    together = sum(alone[site].increase for site in rows["blocks.0"].sites)
    assert rows["blocks.0"].increase == pytest.approx(together, rel=0.5)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"data": []}, "no batches"),
    ({"loss": lambda output, batch: output.sum() * math.nan}, "the loss is nan"),
    ({"loss": lambda output, batch: output}, "must return one number"),
    ({"loss": lambda output, batch: output.detach().sum()}, "has no gradient"),
    ({"groups": "nothing.*"}, "matches no module"),
    ({"top": -1}, "at least 0"),
])
def test_bad_input_is_named(digits, arguments, message):
    sim, batches = digits
    with pytest.raises(CalibrationError, match=message):
        sim.sensitivity(**{"data": batches, "progress": False, **arguments})
    assert all(quantizer.mode is qtk.Mode.SIMULATE for quantizer in sim.quantizers.values())


class Sums(nn.Module):
    """Outputs that depend on all values before them along an axis."""

    def __init__(self, axis):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.axis = nn.Linear(8, 8), axis

    def forward(self, x):
        return self.linear(x).cumsum(self.axis)


def calibrated(model, batches):
    sim = qtk.QuantSim(model.eval(), batches[0], dynamic_shapes=None)
    sim.compute_encodings(batches, progress=False)
    return sim


@pytest.mark.medium
@pytest.mark.parametrize(("axis", "shape"), [(0, (64, 2, 8)), (1, (64, 2, 8))])
def test_an_axis_of_time_is_not_taken_for_samples(axis, shape):
    generator = torch.Generator().manual_seed(1)
    batches = [1 + 0.1 * torch.randn(shape, generator=generator) for _ in range(24)]
    (row,) = [row for row in calibrated(Sums(axis), batches).sensitivity(batches, top=100, progress=False)
              if row.name == "linear.weight"]
    assert 0.4 < row.estimated_increase / row.increase < 2.5  # 24 random signs; a factor of 67 with time as samples


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_is_named(digits, context):
    sim, batches = digits
    with pytest.raises(CalibrationError, match="forward turns gradients off"):
        sim.sensitivity(batches, forward=context()(lambda model, batch: model(batch)), progress=False)


def test_batches_with_gradients_of_their_own_are_the_same(digits):
    sim, batches = digits
    expected = sim.sensitivity(batches[:1], top=0, progress=False)
    found = sim.sensitivity([batches[0].clone().requires_grad_()], top=0, progress=False)
    assert [(row.name, row.increase) for row in found] == [(row.name, row.increase) for row in expected]


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        scores = self.second(self.first(x).relu().detach())
        return scores.masked_fill(torch.tensor([False, False, True, False]), float("-inf"))


@pytest.mark.medium
def test_sites_without_a_gradient_are_measured_first():
    """Nothing is known of what is in front of detach; scores that are masked count neither in float nor simulated."""
    batches = [torch.randn(32, 8)]
    sim = calibrated(Detached(), batches)
    sim.set_range("relu:out", low=0.0, high=0.01)
    unknown = [row.name for row in sim.sensitivity(batches, top=0, progress=False) if math.isnan(row.increase)]
    assert "relu:out" in unknown
    assert "no gradient" in str(sim.sensitivity(batches, top=0, progress=False))
    rows = sim.sensitivity(batches, top=len(unknown), progress=False)
    assert rows[0].name == "relu:out"
    assert rows[0].exact
    assert {row.name for row in rows if row.exact} == set(unknown)


class Overwrites(nn.Module):
    """Python between two layers that writes into the value of the first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.first(x)
        if float(hidden.detach().abs().max()) > 1e-3:  # keeps the model in Python
            hidden.clamp_(-0.3, 0.3)
        return self.second(hidden)


@pytest.mark.medium
def test_values_that_are_overwritten_are_not_known():
    batches = [torch.randn(32, 8)]
    sim = calibrated(Overwrites(), batches)
    rows = sim.sensitivity(batches, top=100, progress=False)
    for row in rows:
        assert math.isnan(row.estimated_increase) or row.estimated_increase < 10 * row.increase + 1e-6
    assert all(row.exact for row in rows)


class PerToken(nn.Module):
    """Words of which the padding is far larger than any other."""

    def __init__(self):
        super().__init__()
        self.words, self.first, self.second = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.words.weight[19] *= 30

    def forward(self, ids, mask):
        return self.second(torch.relu(self.first(self.words(ids)))), mask


@pytest.mark.medium
def test_padding_has_no_part_in_what_the_outputs_lose():
    """Against the same sequences without padding."""
    torch.manual_seed(0)
    ids, mask = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 19, 19]]), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    batch = {"ids": ids, "mask": mask}
    rules = [{"match": {"op": ["linear", "embedding"]}, "weight": {"scheme": "min_max"}}]
    sim = qtk.QuantSim(PerToken().eval(), batch, weight_bits=4, dynamic_shapes="all",
                       config={"version": 1, "extends": "default", "rules": rules})
    sim.compute_encodings([batch], progress=False, valid="mask")
    sequences = [{"ids": ids[:1], "mask": mask[:1]}, {"ids": ids[1:, :3], "mask": mask[1:, :3]}]
    plain, counted, padded = (
        {row.name: row for row in sim.sensitivity(data, top=99, progress=False, **options)}
        for data, options in ((sequences, {}), ([batch], {"valid": "mask"}), ([batch], {}))
    )
    assert plain.keys() == counted.keys()
    for name, row in plain.items():
        assert counted[name].increase == pytest.approx(row.increase, rel=1e-3, abs=1e-9)
        assert counted[name].recovery == pytest.approx(row.recovery, rel=1e-3, abs=1e-9)
    assert padded["second.weight"].increase != pytest.approx(plain["second.weight"].increase, rel=0.05)
    by_function = sim.sensitivity([batch], top=0, progress=False, valid=lambda batch: batch["mask"])
    estimated = {row.name: row.increase for row in by_function}
    assert 0.3 < estimated["second.weight"] / plain["second.weight"].increase < 3  # one draw of random signs
    with pytest.raises(CalibrationError, match="loss and valid exclude each other"):
        sim.sensitivity([batch], loss=lambda output, batch: output[0].mean(), valid="mask")
