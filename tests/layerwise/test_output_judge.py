"""Chains and their parts are compared by the model's outputs over samples that no method has seen."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ArgumentError, CalibrationError
from qtk.workflow import layerwise

CHAIN = ["seq_mse", "coordinate_descent"]
KEPT = 32
"""Samples that methods see, of each batch of 40."""


class TwoOutputs(nn.Module):
    """Scores of every token, and one number a sample. Shape: x [N, T, 12]; results [N, T, 6] and [N]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scores, self.number = nn.Linear(12, 16), nn.Linear(16, 6), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x).relu()
        return self.scores(x), self.number(x.mean(1))[:, 0]


def data(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(12, 12, generator=generator)
    return [each @ mixing for each in torch.randn(3, 40, 5, 12, generator=generator)]


def made(seed: int = 0, **given: object) -> tuple[qtk.QuantSim, nn.Module, list[torch.Tensor]]:
    torch.manual_seed(seed)
    model, batches = TwoOutputs().eval(), data(seed)
    sim = qtk.QuantSim(model, batches[0], **{"weight_bits": 3, "activation_bits": 6} | given)
    sim.compute_encodings(batches, progress=False)
    return sim, model, batches


@torch.no_grad()
def by_formula(sim: qtk.QuantSim, model: nn.Module, batches: list, counted: torch.Tensor | None = None) -> float:
    """The divergence in float64, held-out sample by sample: of scores Kullback and Leibler's, of numbers in power."""
    total, rows, noise, signal, numbers = 0.0, 0, 0.0, 0.0, 0
    for batch in batches:
        (p, a), (q, b) = ([each.double() for each in run(batch)] for run in (model, sim.model))
        for sample in range(KEPT, 40):
            for token in range(p.shape[1]):
                if counted is None or counted[sample, token]:
                    x, y = (each[sample, token].log_softmax(-1) for each in (p, q))
                    total, rows = total + float((x.exp() * (x - y)).sum()), rows + 1
        parts = float((a - b)[KEPT:].square().sum()), float(a[KEPT:].square().sum())
        noise, signal, numbers = noise + 8 * parts[0] / parts[1], signal + parts[1], numbers + 8
    return total / rows + noise / numbers


def judging(**given: object) -> qtk.LayerwiseOptions:
    return qtk.LayerwiseOptions(judge_parts=True, **given)


def state(sim: qtk.QuantSim) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in sim.model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("masked", [False, True])
def test_what_is_judged_is_what_was_held_out(masked):
    sim, model, batches = made()
    counted = torch.ones(40, 5, dtype=torch.bool)
    if masked:
        counted[::3, 2:] = False
    given = {"valid": lambda batch: counted} if masked else {}
    plain = by_formula(sim, model, batches, counted)
    report = qtk.apply_layerwise(sim, batches, CHAIN, options=judging(), progress=False, **given)
    assert list(report.judged) == ["plain rounding", "SeqMse + CoordinateDescent", "SeqMse", "CoordinateDescent"]
    assert report.judged["plain rounding"] == pytest.approx(plain, rel=1e-4)
    assert min(report.judged.values()) == pytest.approx(by_formula(sim, model, batches, counted), rel=1e-4)


@pytest.mark.parametrize(("seed", "winner"), [(0, "SeqMse + CoordinateDescent"), (3, "CoordinateDescent")])
def test_the_best_part_is_kept_as_if_it_had_been_called_alone(seed, winner):
    sim, model, batches = made(seed, activation_bits=None)
    report = qtk.apply_layerwise(sim, batches, CHAIN, options=judging(), progress=False)
    assert min(report.judged, key=report.judged.get) == winner
    assert f"{winner} kept" in str(report)
    for name, methods in zip(list(report.judged)[1:], (CHAIN, CHAIN[:1], CHAIN[1:]), strict=True):
        alone, _, _ = made(seed, activation_bits=None)
        expected = qtk.apply_layerwise(alone, batches, methods, progress=False)
        assert report.judged[name] == pytest.approx(by_formula(alone, model, batches), rel=1e-4)
        if name == winner:
            assert same(state(sim), state(alone))
            assert report.layers == expected.layers


def test_a_loader_that_shuffles_is_run_once():
    sim, model, batches = made()
    orders = iter([[0, 1, 2]])  # a second turn would raise

    class Shuffled:
        def __iter__(self):
            return iter([batches[index] for index in next(orders)])

    report = qtk.apply_layerwise(sim, Shuffled(), CHAIN, options=judging(), progress=False)
    assert min(report.judged.values()) == pytest.approx(by_formula(sim, model, batches), rel=1e-4)


def test_later_calls_know_the_float_weights():
    sim, _, batches = made()
    qtk.apply_layerwise(sim, batches, CHAIN, options=judging(), progress=False)
    assert qtk.apply_gptq(sim, batches, options=qtk.LayerwiseOptions(start="float"), progress=False).restarted
    alone, _, _ = made()
    qtk.apply_gptq(alone, batches, progress=False)
    assert same(state(sim), state(alone))


def test_one_method_is_not_judged():
    sim, _, batches = made()
    assert not qtk.apply_layerwise(sim, batches, "gptq", options=judging(), progress=False).judged


def test_reconstruction_goes_on_from_the_best_part():
    sim, _, batches = made()
    learned = "reconstruction(iterations=3)"
    report = qtk.apply_layerwise(sim, batches, [*CHAIN, learned], options=judging(), progress=False)
    assert "SeqMse" in report.judged
    assert "…" in report.layers[-1].name


def test_a_failure_in_a_later_part_leaves_everything_as_it_was(monkeypatch):
    sim, _, batches = made()
    before, applied, count = state(sim), layerwise._applied, [0]

    def failing(*given):
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return applied(*given)

    monkeypatch.setattr(layerwise, "_applied", failing)
    with pytest.raises(KeyboardInterrupt):
        qtk.apply_layerwise(sim, batches, CHAIN, options=judging(), progress=False)
    assert same(state(sim), before)
    assert sim.quantizers["first.weight"].original is None


def test_what_cannot_be_judged_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"judge_parts compares results over samples that are held out, and hold"):
        judging(holdout=0.0)
    sim, _, batches = made()
    with pytest.raises(CalibrationError, match=r"the model returns no float tensor of samples that are held out"):
        qtk.apply_layerwise(sim, [each[:1] for each in batches], CHAIN, options=judging(), progress=False)

    class Python(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) if float(x.sum()) < 1e9 else x

    sim = qtk.QuantSim(Python().eval(), batches[0], weight_bits=3, activation_bits=None)
    with pytest.raises(CalibrationError, match=r"^judge_parts needs a model of one graph"):
        qtk.apply_layerwise(sim, batches, CHAIN, options=judging(), progress=False)


def test_a_killed_run_resumes_each_part(tmp_path):
    results = []
    for _ in range(2):
        sim, _, batches = made()
        report = qtk.apply_layerwise(sim, batches, CHAIN, options=judging(checkpoint_dir=tmp_path), progress=False)
        results.append((state(sim), report.judged))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


@pytest.mark.medium
def test_a_part_that_works_beside_others_alone_is_left_out():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16, bias=False), nn.ReLU(), nn.Linear(16, 6, bias=False)).eval()
    batches = [each[:, 0] for each in data()]
    sim = qtk.QuantSim(model, batches[0], weight_bits=3)
    sim.compute_encodings(batches, progress=False)
    report = qtk.apply_layerwise(sim, batches, ["gptq", "bias_correction"], options=judging(), progress=False)
    assert [*report.judged] == ["plain rounding", "Gptq + BiasCorrection", "Gptq"]
    assert report.kept in report.judged
    assert f"{report.kept} kept" in str(report)


@pytest.mark.medium
def test_two_methods_of_one_kind_are_told_apart_by_their_settings():
    sim, _, batches = made()
    methods = ["gptq(damping=0.01)", "gptq(damping=5.0)"]
    report = qtk.apply_layerwise(sim, batches, methods, options=judging(), progress=False)
    assert len(report.judged) == 4
    assert report.kept == min([name for name in report.judged if name != "plain rounding"], key=report.judged.get)
    assert any("damping=5.0" in name for name in report.judged)
