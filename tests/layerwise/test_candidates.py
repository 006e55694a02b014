"""Which candidate is taken, judged with every held-out output formed, in float64."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from qtk.algorithms.coordinate_descent import Descent
from qtk.algorithms.gptq import Feedback
from qtk.algorithms.hessian_factor import HessianFactor
from qtk.layerwise import adaround, candidates
from qtk.layerwise.adaround import AdaRound
from qtk.layerwise.bias_correction import BiasCorrection
from qtk.layerwise.candidates import choose, least_prior, shrinkage, unreached
from qtk.layerwise.coordinate_descent import REHEARSED, CoordinateDescent
from qtk.layerwise.gptq import ROUNDS, Gptq
from qtk.layerwise.layer_state import LayerState
from qtk.layerwise.seq_mse import SeqMse
from qtk.moments.holdout import Holdout
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments
from tests.layerwise.layers import CHANNEL, layer_of

ROWS, WIDTH, KEPT = 100, 16, 80
LAST_FIFTH = Holdout(0.2)


@dataclass(frozen=True)
class Harmful:
    """Rounds every weight to 0."""

    needs_bias: ClassVar[bool] = False
    searches_scale: ClassVar[bool] = False

    def min_rows(self, columns):
        return 0

    def refuses(self, spec):
        return None

    def required_statistics(self, block):
        return RequiredStatistics()

    def apply(self, state):
        return state.updated(weight=torch.zeros_like(state.to_gemm(state.weight)))


class Layer:
    def __init__(self, holdout=LAST_FIFTH, unlike=False):
        generator = torch.Generator().manual_seed(0)
        self.module = nn.Linear(WIDTH, 6)
        with torch.no_grad():
            self.module.weight.copy_(torch.randn(6, WIDTH, generator=generator))
        self.x = torch.randn(ROWS, WIDTH, generator=generator) @ torch.randn(WIDTH, WIDTH, generator=generator) + 1
        if unlike:  # the first rows say hardly more than one direction, the last ones all
            self.x[:KEPT] = torch.randn(KEPT, 1, generator=generator) * torch.randn(WIDTH, generator=generator)
            self.x[:KEPT] += 0.02 * torch.randn(KEPT, WIDTH, generator=generator)
            self.x[KEPT:] = torch.randn(ROWS - KEPT, WIDTH, generator=generator)
        self.quantized = self.x if unlike else self.x + 0.3 * torch.randn(ROWS, WIDTH, generator=generator)
        layer = layer_of(self.module, self.x, CHANNEL)
        moments = SecondMoments(layer.geometry, RequiredStatistics(dtype=torch.float64, holdout=holdout))
        moments.observe(self.quantized, self.x)
        self.start = LayerState.of(layer, moments, torch.float64)

    def lost(self, state, rows):
        """Squared error of the outputs of some rows."""
        weight, simulated = (each.double() for each in (self.start.float_weight, state.simulated_weight()))
        shift = (state.bias - self.start.bias).double()
        return float((self.x[rows].double() @ weight.T - self.quantized[rows].double() @ simulated.T - shift)
                     .square().sum())


@pytest.mark.parametrize("methods", [
    [SeqMse()], [Gptq()], [CoordinateDescent()], [SeqMse(), Gptq(), BiasCorrection()]
], ids=["seq_mse", "gptq", "descent", "chain"])
def test_errors_are_those_of_the_outputs_held_out_and_of_all(methods):
    layer = Layer()
    winner = choose(layer.start, methods)
    held_out = [layer.lost(state, slice(KEPT, None)) for state in (layer.start, winner.state)]
    assert held_out[1] < held_out[0]
    assert winner.held_out[0] - winner.held_out[1] == pytest.approx(held_out[0] - held_out[1], rel=1e-5)
    everything = [layer.lost(state, slice(None)) for state in (layer.start, winner.state)]
    assert winner.before - winner.after == pytest.approx(everything[0] - everything[1], rel=1e-5)
    assert winner.name.startswith(type(methods[0]).__name__)
    assert ", prior " in winner.name


def test_what_does_not_lower_the_held_out_error_is_not_taken():
    layer = Layer()
    winner = choose(layer.start, [Harmful()])
    assert winner.state is layer.start
    assert winner.name == "none"
    assert winner.held_out[0] == winner.held_out[1]
    unjudged = choose(Layer(None).start, [Harmful()])
    assert not unjudged.state.weight.any()
    assert unjudged.held_out is None


def test_where_the_chain_does_harm_a_method_alone_is_taken():
    layer = Layer()
    winner = choose(layer.start, [Gptq(), Harmful()])
    assert winner.name == "Gptq, prior 0.3"
    assert layer.lost(winner.state, slice(KEPT, None)) < layer.lost(layer.start, slice(KEPT, None))


@pytest.mark.medium
def test_the_prior_grows_as_long_as_the_held_out_error_falls():
    like, layer, unjudged = Layer(), Layer(unlike=True), Layer(unlike=True)
    assert choose(like.start, [CoordinateDescent()]).name == "CoordinateDescent, prior least"
    judged = choose(layer.start, [CoordinateDescent()])
    assert judged.name in ("CoordinateDescent, prior 0.01", "CoordinateDescent, prior 0.03")
    unjudged.start.moments.held_out = None
    least = choose(unjudged.start, [CoordinateDescent()])
    rest = slice(KEPT, None)
    assert layer.lost(judged.state, rest) < min(layer.lost(layer.start, rest), unjudged.lost(least.state, rest))


@pytest.mark.medium
def test_held_out_rows_change_only_the_choice():
    layer, other = Layer(), Layer()
    scaled = other.start.moments.held_out
    for total in scaled.sums.values():
        total *= 4
    scaled.rows *= 4
    assert torch.equal(choose(layer.start, [Gptq()]).state.weight, choose(other.start, [Gptq()]).state.weight)


def few_directions(rows, reached, columns=48, seed=0):
    """Rows [rows, columns] in ``reached`` directions, of unequal power, in float32."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(columns, columns, generator=generator))[0][:reached]
    return (torch.randn(rows, reached, generator=generator) * torch.logspace(0, -1, reached)) @ basis


@pytest.mark.parametrize("reached", [1, 12, 40, 48])
def test_directions_that_no_rows_reach_are_counted_from_below(reached):
    x = few_directions(1000, reached)
    for gram in (x.mT @ x, (x.mT @ x).double(), 1e6 * (x.mT @ x)):
        share = unreached(gram[None, None]).item()
        values = torch.linalg.eigvalsh(x.double().mT @ x.double()).clamp(min=0)
        most = (1e-4 * values.mean() / (values + 1e-4 * values.mean())).mean().item()
        assert most == pytest.approx(1 - reached / 48, abs=2e-3)
        assert share <= most + 1e-4
        assert share >= 0.1 * most - 1e-6
    assert unreached(torch.zeros(2, 1, 3, 3)).tolist() == [[0.0], [0.0]]
    silent = torch.diag(torch.tensor([1.0, 2.0, 0.0, 0.0]))
    assert unreached(silent[None, None]).item() < 1e-3


def test_rows_of_few_directions_get_a_prior_however_many_they_are():
    for rows in (1000, 10000):
        x = few_directions(rows, 12)
        assert least_prior((x.mT @ x)[None, None], rows).item() > 0.005
    x = few_directions(10000, 48)
    assert least_prior((x.mT @ x)[None, None], 10000).item() < 0.004


def test_gptq_holds_for_rows_in_directions_that_no_data_reached():
    """A token that the calibration data lack has an embedding which no Gram matrix knows."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(40, 64, generator=generator)  # an embedding: 30 tokens are seen, 10 are not
    module = nn.Linear(64, 32, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.randn(32, 64, generator=generator))
    x = table[torch.randint(0, 30, (3000,), generator=generator)]
    layer = layer_of(module, x, CHANNEL)
    lost = {}
    for prior in (0.0, candidates.UNREACHED_PRIOR):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(candidates, "UNREACHED_PRIOR", prior)
            moments = SecondMoments(layer.geometry, RequiredStatistics(dtype=torch.float64, holdout=LAST_FIFTH))
            moments.observe(x, x)
            start = LayerState.of(layer, moments, torch.float64)
            found = choose(start, [Gptq()]).state.simulated_weight()
            lost[prior] = [float((rows @ (module.weight - found).detach().mT).square().mean())
                           for rows in (table[:30], table[30:])]
    (seen, unseen), (seen_now, unseen_now) = lost.values()
    assert unseen_now < 0.9 * unseen
    assert seen_now < 1.1 * seen


def test_shrinkage_brings_gram_matrices_closer_to_those_of_endless_data():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(12, 12, generator=generator).double()
    truth = mixing.T @ mixing
    plain = shrunk = 0.0
    for _ in range(50):
        x = torch.randn(10, 12, generator=generator).double() @ mixing
        gram = x.T @ x / 10
        prior = shrinkage(gram[None, None], 10).item()
        identity = gram.diagonal().mean() * torch.eye(12)
        plain += float((gram - truth).square().sum())
        shrunk += float(((gram + prior * identity) / (1 + prior) - truth).square().sum())
    assert shrunk < 0.9 * plain


def test_without_held_out_rows_the_methods_are_taken_unjudged():
    layer = Layer()
    layer.start.moments.held_out = None
    winner = choose(layer.start, [Gptq()])
    assert (winner.name, winner.held_out) == ("Gptq", None)


class Wide:
    """A layer of many outputs whose first rows of data are unlike the held-out ones."""

    def __init__(self, outputs, spec=CHANNEL):
        generator = torch.Generator().manual_seed(0)
        module = nn.Linear(WIDTH, outputs)
        with torch.no_grad():
            module.weight.copy_(torch.randn(outputs, WIDTH, generator=generator))
        x = torch.randn(KEPT, 1, generator=generator) * torch.randn(WIDTH, generator=generator)
        x = torch.cat([x + 0.02 * torch.randn(KEPT, WIDTH, generator=generator),
                       torch.randn(ROWS - KEPT, WIDTH, generator=generator)])
        layer = layer_of(module, x, spec)
        moments = SecondMoments(layer.geometry, RequiredStatistics(dtype=torch.float64, holdout=LAST_FIFTH))
        moments.observe(x + 0.1 * torch.randn(ROWS, WIDTH, generator=generator), x)
        self.start = LayerState.of(layer, moments, torch.float64)


@dataclass(frozen=True)
class Counted(Gptq):
    """GPTQ that notes how many outputs it was given."""

    def apply(self, state):
        runs.append(len(state.weight))
        return super().apply(state)


runs: list[int] = []


def test_the_prior_is_chosen_by_some_outputs_and_the_methods_run_once_for_all():
    layer = Wide(1024)
    runs.clear()
    winner = choose(layer.start, [Counted(), BiasCorrection()])
    assert runs[-1] == 1024
    assert set(runs[:-1]) == {128}
    assert len(runs) > 2
    every = Wide(1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "OUTPUT_STRIDE", 1)
        expected = choose(every.start, [Counted(), BiasCorrection()])
    assert winner.name == expected.name
    assert torch.equal(winner.state.weight, expected.state.weight)
    assert winner.held_out == pytest.approx(expected.held_out, rel=1e-12)


def test_no_prior_is_factorized_twice(monkeypatch):
    factored, factorize = [], HessianFactor.of

    def counted(hessian, *settings):
        factored.append(float(hessian.diagonal(dim1=-2, dim2=-1).sum()))
        return factorize(hessian, *settings)

    monkeypatch.setattr(HessianFactor, "of", counted)
    torch.manual_seed(0)
    x = torch.randn(400, WIDTH).double() @ torch.randn(WIDTH, WIDTH).double()
    layer = layer_of(nn.Linear(WIDTH, 1024), x.float(), CHANNEL)
    moments = SecondMoments(layer.geometry, RequiredStatistics(dtype=torch.float64, holdout=LAST_FIFTH))
    moments.observe(x)
    assert choose(LayerState.of(layer, moments, torch.float64), [Gptq()]).name != candidates.NONE
    assert len(factored) == len(set(factored)) > 1


@pytest.mark.parametrize("method", [Gptq(), CoordinateDescent(), SeqMse()], ids=["gptq", "descent", "seq_mse"])
def test_some_outputs_alone_are_found_as_among_all(method):
    start, some = Wide(96).start, slice(None, None, 3)
    whole, part = method.apply(start), method.apply(replace(start.of_outputs(some), rehearses=False))
    torch.testing.assert_close(part.simulated_weight(), whole.simulated_weight()[some], rtol=1e-6, atol=1e-6)
    assert torch.equal(part.encoding.scale, whole.encoding.scale[some])


def test_a_rehearsal_is_shorter(monkeypatch):
    start, descents, passes, roundings = Wide(96).start, [], [], []
    monkeypatch.setattr(adaround, "adaround", lambda *given: descents.append(given[-1]) or given[0])
    run_pass, rounded = Descent.run_pass, Feedback.rounded
    for state in (start, start.of_outputs(slice(None, None, 3))):
        AdaRound(iterations=40).apply(state)
        with monkeypatch.context() as patch:
            patch.setattr(Descent, "run_pass", lambda *given: passes.append(given[0]) or run_pass(*given))
            CoordinateDescent().apply(state)
            patch.setattr(Feedback, "rounded", lambda *given: roundings.append(given[0]) or rounded(*given))
            Gptq().apply(replace(state, moves_scales=True))
        passes.append(None)
        roundings.append(None)
    assert [each.iterations for each in descents] == [40, 10]
    assert passes.index(None) > REHEARSED
    assert len(passes) == passes.index(None) + 1 + REHEARSED + 1
    assert (roundings.index(None), len(roundings)) == (1 + ROUNDS, 1 + ROUNDS + 1 + 2 + 1)


@pytest.mark.parametrize("methods", [[Gptq(), BiasCorrection()], [SeqMse(loss="sqnr"), Gptq()]], ids=["bias", "sqnr"])
def test_statistics_stay_without_the_prior_while_methods_read_them(methods):
    x, generator = torch.randn(ROWS, WIDTH), torch.Generator().manual_seed(0)
    layer = layer_of(nn.Linear(WIDTH, 8), x, CHANNEL)
    moments = SecondMoments(layer.geometry, RequiredStatistics(difference=True, holdout=LAST_FIFTH))
    moments.observe(x + 0.1 * torch.randn(ROWS, WIDTH, generator=generator), x)
    start = LayerState.of(layer, moments)
    expected = start.error.gram.clone()
    choose(start, methods)
    assert torch.equal(moments.gram_as(torch.float32), expected)
    assert torch.equal(start.error.gram, expected)


def test_where_float32_has_no_factor_directions_are_counted_in_float64():
    gram = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]) * torch.finfo(torch.float32).tiny
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        factor = candidates.cholesky
        patch.setattr(candidates, "cholesky", lambda matrix: asked.append(matrix.dtype) or (
            (matrix, torch.tensor([True])) if matrix.dtype == torch.float32 else factor(matrix)))
        found, expected = (unreached(each[None, None]).item() for each in (gram, gram.double()))
    assert found == pytest.approx(expected, rel=1e-3)
    assert asked[:2] == [torch.float32, torch.float64]


def test_outputs_that_share_a_scale_are_not_taken_apart():
    start = Wide(512, {"symmetric": True, "granularity": "per_tensor"}).start
    assert start.of_outputs(slice(None, None, 8)) is None


def test_layers_of_few_outputs_are_not_rehearsed():
    runs.clear()
    choose(Wide(127).start, [Counted()])
    assert set(runs) == {127}


def test_a_direction_of_a_hundred_asks_for_no_prior_beside_the_shrinkage_and_ten_do():
    generator = torch.Generator().manual_seed(0)
    for missing, asks in ((1, False), (10, True)):
        x = torch.randn(5000, 100, generator=generator)
        x[:, :missing] = x[:, missing:2 * missing]
        gram = (x.mT @ x)[None, None]
        assert 0 < unreached(gram).item() < 0.12
        assert bool(least_prior(gram, 5000) > shrinkage(gram, 5000)) == asks
