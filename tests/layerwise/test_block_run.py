import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError
from qtk.layerwise import block_run

CHAIN = ["seq_mse", "gptq"]
FEW = "reconstruction(iterations=12, window=1, learning_rate=0.1, range_learning_rate=0.02)"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.inner(x.relu()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.last = nn.GRU(8, 12, batch_first=True), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.gru(x)[0][:, -1])


def data(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(4, 40, *shape, generator=generator))


def simulated(model: type[nn.Module] = Residual, *shape: int, **given: object) -> tuple[qtk.QuantSim, nn.Module, list]:
    torch.manual_seed(0)
    net, batches = model().eval(), data(*shape or (8,))
    sim = qtk.QuantSim(net, batches[0], **{"weight_bits": 3, "activation_bits": 3} | given)
    sim.compute_encodings(batches, progress=False)
    return sim, net, batches


def state_of(sim: qtk.QuantSim) -> dict:
    found = {name: value.clone() for name, value in sim.model.state_dict().items()}
    return found | {name: torch.tensor([each.frozen, each.learns_range]) for name, each in sim.quantizers.items()}


def are_equal(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.medium
@pytest.mark.parametrize(("model", "shape"), [
    (Residual, (8,)), pytest.param(Recurrent, (5, 8), marks=pytest.mark.slow)])
def test_the_error_of_held_out_samples_falls_and_unseen_outputs_come_closer(model, shape):
    sim, net, batches = simulated(model, *shape)
    unseen = torch.randn(400, *shape, generator=torch.Generator().manual_seed(1))
    qtk.apply_layerwise(sim, batches, CHAIN, progress=False)
    lost = [float((sim.model(unseen) - net(unseen)).detach().square().sum())]
    report = qtk.apply_layerwise(sim, batches, FEW.replace("12", "60"), progress=False)
    lost.append(float((sim.model(unseen) - net(unseen)).detach().square().sum()))
    assert lost[1] < lost[0]
    assert any("Reconstruction, loss" in layer.winner for layer in report.layers)
    assert not any(quantizer.learns_range for quantizer in sim.quantizers.values())
    written = [name for name, quantizer in sim.quantizers.items() if quantizer.rewrote_weight]
    assert "last.weight" in written
    for name in written:
        weight = sim.model.get_parameter(name)
        assert torch.equal(sim.quantizers[name](weight), weight)  # on the grid


@pytest.mark.medium
def test_a_chain_in_one_call_is_the_same_as_two_calls_and_keeps_zeros():
    sims = [simulated()[0] for _ in range(2)]
    for sim in sims:
        with torch.no_grad():
            sim.model.get_parameter("inner.weight").view(16, 4, 4)[..., :2] = 0
    batches, chain = data(8), [*CHAIN, FEW]
    qtk.apply_layerwise(sims[0], iter(batches), chain, progress=False)
    qtk.apply_layerwise(sims[1], batches, CHAIN, progress=False)
    qtk.apply_layerwise(sims[1], batches, FEW, progress=False)
    assert are_equal(state_of(sims[0]), state_of(sims[1]))
    assert not sims[0].model.get_parameter("inner.weight").view(16, 4, 4)[..., :2].any()


@pytest.mark.medium
def test_a_killed_run_resumes_with_the_same_result_and_leaves_nothing_behind(tmp_path, monkeypatch):
    sim, _, batches = simulated()
    whole = qtk.apply_layerwise(sim, batches, FEW, progress=False)
    options = qtk.LayerwiseOptions(checkpoint_dir=tmp_path)
    again, killed, learn = simulated()[0], state_of(simulated()[0]), block_run.BlockRun._descend
    windows = []

    def second_fails(self, window, roundings, *, with_held_out=False):
        windows.extend([] if with_held_out else [window.name])
        learn(self, window, roundings, with_held_out=with_held_out)
        if len(windows) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(block_run.BlockRun, "_descend", second_fails)
    with pytest.raises(KeyboardInterrupt):
        qtk.apply_layerwise(again, batches, FEW, options=options, progress=False)
    assert are_equal(state_of(again), killed)
    resumed = qtk.apply_layerwise(again, batches, FEW, options=options, progress=False)
    assert windows[2:] == ["inner.weight", "last.weight"]
    assert are_equal(state_of(again), state_of(sim))
    assert str(resumed) == str(whole)


@pytest.mark.medium
def test_what_does_not_help_is_undone():
    sim, _, batches = simulated()
    qtk.apply_layerwise(sim, batches, CHAIN, progress=False)
    before = state_of(sim)
    wild = "reconstruction(iterations=1, window=1, learning_rate=50, range_learning_rate=0.9)"
    report = qtk.apply_layerwise(sim, batches, wild, progress=False)
    assert [layer.winner for layer in report.layers] == ["none"] * 3
    assert are_equal(state_of(sim), before)


@pytest.mark.medium
@pytest.mark.parametrize("model", [Residual, Recurrent])
def test_biases_are_learned_kept_for_later_calls_and_left_at_a_rate_of_zero(model):
    sim, net, batches = simulated(model, *((8,) if model is Residual else (5, 8)))
    qtk.apply_layerwise(sim, batches, FEW, progress=False)
    biases = {name: each for name, each in net.named_parameters() if "bias" in name}
    learned = {name: sim.model.get_parameter(name).clone() for name in biases}
    assert any(not torch.equal(learned[name], each) for name, each in biases.items())
    sim, net, batches = simulated(model, *((8,) if model is Residual else (5, 8)))
    report = qtk.apply_layerwise(sim, batches, FEW.replace(")", ", bias_learning_rate=0)"), progress=False)
    assert any(layer.winner != "none" for layer in report.layers)
    assert all(torch.equal(sim.model.get_parameter(name), each) for name, each in biases.items())


@pytest.mark.medium
def test_a_bias_that_another_layer_has_too_is_not_learned():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.bias = self.a.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).relu())

    for sites, is_learned in ((["a.weight"], False), (None, True)):
        sim, net, batches = simulated(Shared)
        methods = "reconstruction(iterations=40, window=2)"
        report = qtk.apply_layerwise(sim, batches, methods, sites=sites, progress=False)
        assert any(layer.winner != "none" for layer in report.layers)
        assert torch.equal(sim.model.get_parameter("a.bias"), net.a.bias) is not is_learned


def test_what_cannot_be_reconstructed_is_refused():
    sim, _, batches = simulated()
    for methods, options, message in (
        (["reconstruction", "gptq"], {}, "name it last"),
        (["reconstruction"], {"inputs": "symqt"}, "asym"),
        (["reconstruction"], {"sparsity": "2:4"}, "a method before it chooses the mask"),
    ):
        with pytest.raises(CalibrationError, match=message):
            qtk.apply_layerwise(sim, batches, methods, options=qtk.LayerwiseOptions(**options), progress=False)


class Masked(nn.Module):
    """Attention whose mask, from several windows read, is made in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 24), nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.full((5, 5), -torch.inf).triu(1)
        for layer in (self.first, self.last):
            query, key, value = layer(x).chunk(3, -1)
            x = x + (query @ key.mT + mask).softmax(-1) @ value
        return x


@pytest.mark.medium
def test_a_mask_that_leaves_a_window_adds_no_error():
    sim, _, batches = simulated(Masked, 5, 8)
    report = qtk.apply_layerwise(sim, batches, [FEW], progress=False)
    assert len(report.layers) == 2
    assert all(layer.sqnr_db > 0 for layer in report.layers)
