"""Against the squares of weights, and against torch's own derivatives."""

import pytest
import torch
from torch import nn

import qtk
from qtk.calibration.local_gradients import LocalGradients
from qtk.calibrators.activation_mse import ActivationMse
from qtk.core.granularity import PerTensor
from qtk.core.spec import QuantSpec
from qtk.data.valid_tokens import ValidTokens
from qtk.errors import CalibrationError, QtkError
from qtk.observers.weighted_histogram import WeightedHistogram
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode


def elements_of(model, x, site, *, run=None, valid=None):
    """The values that the observer of a site saw, and their weights, as calls to it were made."""
    sim = qtk.QuantSim(model.eval(), x)
    quantizer = sim.quantizers[site]
    tokens, seen = ValidTokens(sim.model, valid), []

    class Recording(WeightedHistogram):
        def weigh(self, values, factors):
            seen.append((values.clone(), factors.double().square()))
            super().weigh(values, factors)

    observer = Recording(PerTensor())
    gradients = LocalGradients({quantizer: observer}, tokens)
    quantizer.observer = gradients.observers[quantizer]
    with in_mode(sim.quantizers.values(), Mode.BYPASS), in_mode([quantizer], Mode.OBSERVE), \
            gradients.listening(sim.model), tokens.listening():
        output = (run or (lambda model, x: model(x)))(sim.model, x)
    quantizer.observer = None
    assert not any(leaf.requires_grad for leaf in ([output] if isinstance(output, torch.Tensor) else []))
    return seen


@pytest.mark.medium
def test_weights_are_those_of_the_linear_layer_that_reads_the_value():
    """Of one output exactly, of many as an expectation."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(1, 3))
    ((x, weights),) = elements_of(one, torch.randn(40, 6), "0:out")
    torch.testing.assert_close(weights, one[1].weight.double().square().expand_as(x))
    many = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 16), nn.Linear(16, 3))
    ((x, weights),) = elements_of(many, torch.randn(20_000, 6), "0:out")
    expected = many[1].weight.double().square().sum(0)
    assert bool(((weights.mean(0) - expected).abs() < 5 * (2 / 20_000) ** 0.5 * expected).all())


def test_gradients_pass_through_functions_and_movement_up_to_the_next_product():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 1), nn.Linear(1, 4)

        def forward(self, x):
            return self.b(self.a(x.exp().transpose(1, 2).flatten(1)))

    torch.manual_seed(0)
    net, value = Net(), torch.randn(5, 3, 4)
    expected = (value.exp() * net.a.weight.reshape(4, 3).T).double().square()
    ((x, weights),) = elements_of(net, value, "x:input")
    torch.testing.assert_close(x, value)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-9)


def test_several_readers_add_up_in_expectation():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(6, 2)

        def forward(self, x):
            x = self.first(x)
            return self.a(x), self.b(x), x.sum(1)

    torch.manual_seed(0)
    net = Net()
    rows = 20_000
    ((_, weights),) = elements_of(net, torch.randn(rows, 4), "first:out", run=lambda model, x: model(x)[0])
    expected = (net.a.weight.square().sum(0) + net.b.weight.square().sum(0) + 1).double()
    assert bool(((weights.mean(0) - expected).abs() < 5 * (2 / rows) ** 0.5 * expected).all())


@pytest.mark.medium
def test_states_of_a_loop_over_time_are_weighed_at_every_step():
    torch.manual_seed(0)
    net = nn.LSTM(4, 3, batch_first=True)
    seen = elements_of(net, torch.randn(2, 7, 4), "lstm.l0.cell.hidden:out", run=lambda model, x: model(x)[0])
    assert len(seen) == 7
    assert all(float(weights.sum()) > 0 for _, weights in seen)


@pytest.mark.medium
def test_rows_that_are_padding_do_not_count():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x, mask):
            return self.b(self.a(x)) * mask[..., None]

    torch.manual_seed(0)
    x, mask = torch.randn(3, 5, 4), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    sim = qtk.QuantSim(Net().eval(), (x, mask), scheme="activation_mse", activation_bits=4)
    sim.compute_encodings([(x, mask)], valid="mask", progress=False)
    spoiled = torch.where(mask[..., None].bool(), x, 1000.0)
    other = qtk.QuantSim(Net().eval(), (x, mask), scheme="activation_mse", activation_bits=4)
    other.model.load_state_dict(sim.model.state_dict(), strict=False)
    other.compute_encodings([(spoiled, mask)], valid="mask", progress=False)
    assert sim.encodings()["a:out"].equals(other.encodings()["a:out"])


def test_gradients_are_turned_on_for_the_model_alone():
    """Whatever runs it; its parameters, what it is given and the user's gradient mode stay as they were."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    net[0].bias.requires_grad_(False)
    x = torch.randn(16, 4, requires_grad=True)
    sim = qtk.QuantSim(net, x.detach(), scheme="activation_mse")
    flags = {name: each.requires_grad for name, each in sim.model.named_parameters()}
    modes = []

    def forward(model, batch):
        with torch.no_grad():
            output = model(batch)
            modes.append(torch.is_grad_enabled())
        output.numpy()
        return output

    sim.compute_encodings([x], forward=forward, progress=False)
    assert modes == [False]
    assert x.grad is None
    assert {name: each.requires_grad for name, each in sim.model.named_parameters()} == flags
    assert all(each.grad is None for each in sim.model.parameters())
    assert torch.is_grad_enabled()
    assert all(not quantizer._forward_hooks for quantizer in sim.quantizers.values())


@pytest.mark.parametrize("failing", [0, 1])
def test_a_model_that_fails_leaves_no_gradients_on(failing):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x)

    sim = qtk.QuantSim(Net().eval(), torch.randn(2, 4), scheme="activation_mse")
    data = [torch.randn(2, 4), torch.randn(2, 4)]
    data[failing] = torch.randn(2, 5)
    with pytest.raises(QtkError, match=f"batch {failing}"):
        sim.compute_encodings(data, progress=False)
    assert torch.is_grad_enabled()
    assert all(each.requires_grad for each in sim.model.parameters())
    assert all(not quantizer._forward_hooks for quantizer in sim.quantizers.values())


@pytest.mark.medium
def test_inference_mode_of_the_callers_is_left_and_of_forward_refused():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    batches = [torch.randn(64, 4)]
    sim, other = (qtk.QuantSim(net, batches[0], scheme="activation_mse", activation_bits=4) for _ in "ab")
    sim.compute_encodings(batches, progress=False)
    with torch.inference_mode():
        other.compute_encodings([batches[0] * 1], progress=False)
    assert all(each.equals(other.encodings()[name]) for name, each in sim.encodings().items())

    def forward(model, batch):
        with torch.inference_mode():
            return model(batch)

    with pytest.raises(CalibrationError, match=r"inference_mode.*scheme='mse'"):
        sim.compute_encodings(batches, forward=forward, progress=False)


def test_an_op_without_a_derivative_is_named_with_the_way_out():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            x = self.a(x).sigmoid()
            return self.b(torch.igamma(x + 1, x))

    sim = qtk.QuantSim(Net().eval(), torch.randn(2, 4), scheme="activation_mse")
    with pytest.raises(CalibrationError, match=r"derivative.*; use scheme='mse'"):
        sim.compute_encodings([torch.randn(2, 4)], progress=False)


@pytest.mark.medium
def test_values_that_no_output_depends_on_count_evenly():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x).argmax(1) + self.b(x).argmax(1)

    torch.manual_seed(0)
    x = torch.randn(64, 4)
    schemes = "activation_mse", "mse(steps=64)"
    sims = [qtk.QuantSim(Net().eval(), x, scheme=scheme, activation_bits=4, config={
        "version": 1, "defaults": {"activation": {"symmetric": True}}}) for scheme in schemes]
    sims[1].model.load_state_dict(sims[0].model.state_dict(), strict=False)
    for sim in sims:
        sim.compute_encodings([x], progress=False)
    own, other = (sim.encodings()["a:out"] for sim in sims)
    assert own.equals(other)


def test_calibrating_again_gives_the_same():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    data = [torch.randn(4, 3, 10, 10) for _ in range(3)]
    sim = qtk.QuantSim(net, data[0], scheme="activation_mse", activation_bits=4)
    sim.compute_encodings(data, progress=False)
    before = sim.encodings()
    sim.compute_encodings(data, progress=False)
    assert all(each.equals(before[name]) for name, each in sim.encodings().items())


@pytest.mark.medium
def test_one_scheme_for_some_sites_leaves_the_others_as_they_were():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    data = [torch.randn(256, 8)]
    rule = {"match": {"op": "relu"}, "output": {"scheme": "activation_mse"}}
    config = {"version": 1, "extends": "default", "rules": [rule]}
    plain, mixed = qtk.QuantSim(net, data[0], activation_bits=4), qtk.QuantSim(
        net, data[0], activation_bits=4, config=config)
    for sim in (plain, mixed):
        sim.compute_encodings(data, progress=False)
    differing = {name for name, each in plain.encodings().items() if not each.equals(mixed.encodings()[name])}
    assert differing == {"1:out"}


def test_the_scheme_makes_no_observer_that_a_weight_would_not_understand():
    spec = QuantSpec(qtk.dtype("int4"), PerTensor(), symmetric=True)
    observer = ActivationMse().observer(spec.granularity, static=True)
    assert not isinstance(observer, WeightedHistogram)
