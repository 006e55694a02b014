"""qtk.quantize: cheap things first, only what helps, an account of all, nothing lost."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import qtk
from qtk.auto.trial_builder import TrialBuilder
from qtk.errors import CalibrationError, ConfigError
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode

BATCHES = torch.randn(6, 32, 16, generator=torch.Generator().manual_seed(0)).unbind(0)


def model(outliers=1.0):
    """An MLP with one channel of its norm scaled up and what reads it scaled down: ranges of 4 bits lose the others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).eval()
    with torch.no_grad():
        net[0].weight[0] *= outliers
        net[1].weight[:, 0] /= outliers
    return net


def rescaled(error):
    return 10 ** (-error / 10)


@pytest.mark.slow
def test_a_step_is_kept_only_if_the_error_on_held_out_data_falls():
    sim, account = qtk.quantize(model(50.0), BATCHES, weight_bits=4, activation_bits=4, max_drop=0.0, progress=False)
    best = float("inf")
    for trial in account.trials:
        error = rescaled(trial.sqnr_db)
        assert trial.kept == (error < best)
        best = min(best, error)
    kept = [trial.step for trial in account.trials if trial.kept]
    assert "smooth_quant" in kept
    assert len(account.trials) > len(kept)
    net, judged = model(50.0), BATCHES[-1]
    with torch.no_grad():
        error = (sim.model(judged) - net(judged)).square().sum() / net(judged).square().sum()
    assert float(error) == pytest.approx(best, rel=1e-4)
    assert not account.reached
    assert "not reached, nothing else is left to try" in str(account)


@pytest.mark.medium
def test_nothing_is_tried_beyond_what_is_needed():
    _, account = qtk.quantize(model(), BATCHES, progress=False)
    assert [trial.step for trial in account.trials] == ["plain calibration"]
    assert account.reached


@pytest.mark.medium
def test_the_metric_decides_where_there_is_one():
    calls = []

    def metric(net):
        calls.append(net)
        return 1.0 if len(calls) in (1, 4) else 0.5  # float, and the third simulation evaluated

    sim, account = qtk.quantize(model(50.0), BATCHES, weight_bits=4, activation_bits=4, evaluate=metric, progress=False)
    assert account.reached
    assert account.metric == "metric"
    evaluated = [trial for trial in account.trials if trial.drop is not None]
    assert len(evaluated) == 3
    assert evaluated[-1].kept
    assert sim.model is calls[-1]
    assert calls[0] is not sim.model


@pytest.mark.slow
def test_sites_that_lose_most_are_left_precise_at_last():
    """A layer whose weights 2 bits ruin, in a target that has 16 bits, and in one that leaves sites in float."""
    config = {"version": 1, "rules": [{"match": {"path": "3"}, "weight": {"bits": 2}}]}
    sim, account = qtk.quantize(model(), BATCHES, target=config, max_drop=0.002, progress=False)
    assert account.reached
    assert account.best.step == "the worst site precise"
    assert sim.quantizers["3.weight"].spec.dtype.bits == 16
    with_runtime = qtk.QuantSim(model(), BATCHES[0], config="onnxruntime").config.model_dump(mode="json")
    with_runtime["rules"] = config["rules"]
    sim, account = qtk.quantize(model(), BATCHES, target=with_runtime, max_drop=0.002, progress=False)
    assert account.reached
    assert "3.weight" not in sim.quantizers


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("kind", [ValueError("no luck"), float("nan"), "a word"])
def test_an_evaluation_that_fails_costs_its_trial_alone(kind):
    calls = itertools.count()

    def metric(net):
        count = next(calls)
        if count == 2:
            if isinstance(kind, Exception):
                raise kind
            return kind
        return 0.5 if count == 1 else 1.0  # the trial after the failed one ends the search

    _, account = qtk.quantize(model(50.0), BATCHES, weight_bits=4, activation_bits=4, evaluate=metric, progress=False)
    failed = [trial for trial in account.trials if trial.reason and trial.reason.startswith("failed: ")]
    assert len(failed) == 1
    assert {"no luck": "ValueError: no luck"}.get(str(kind), "CalibrationError: evaluate") in failed[0].reason
    assert any(trial.kept for trial in account.trials[account.trials.index(failed[0]):])


@pytest.mark.medium
def test_an_evaluation_that_fails_in_float_is_an_error():
    with pytest.raises(CalibrationError, match="evaluate gives nan for the float model"):
        qtk.quantize(model(), BATCHES, evaluate=lambda net: float("nan"), progress=False)


@pytest.mark.medium
def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("qtk.auto.trial_order.CHAINS", (("gptq", "bias_correction"),))
    monkeypatch.setattr("qtk.auto.trial_order.TRIED_SCHEMES", ("mse",))
    settings = {"weight_bits": 4, "activation_bits": 5, "max_drop": -1.0, "progress": False}  # no block is learned
    evaluated = []

    def metric(net):
        evaluated.append(net)
        if len(evaluated) == stop:
            raise KeyboardInterrupt
        return 0.0

    stop = None
    whole, account = qtk.quantize(model(50.0), BATCHES, evaluate=metric, **settings)
    count, stop = len(evaluated), 4
    evaluated.clear()
    with pytest.raises(KeyboardInterrupt):
        qtk.quantize(model(50.0), BATCHES, evaluate=metric, directory=tmp_path, **settings)
    stop = None
    for expected in (count - 2, 1):  # the float model again, and what was not finished; then the float model alone
        evaluated.clear()
        resumed, again = qtk.quantize(model(50.0), BATCHES, evaluate=metric, directory=tmp_path, **settings)
        assert len(evaluated) == expected
        assert [(t.step, t.kept) for t in again.trials] == [(t.step, t.kept) for t in account.trials]
        assert torch.equal(resumed.model(BATCHES[0]), whole.model(BATCHES[0]))
    with pytest.raises(ConfigError, match=r"trials.json is of another run \(metric, metric in float, outputs differ\)"):
        qtk.quantize(nn.Sequential(*model()[:2]), BATCHES, directory=tmp_path, **settings)


@pytest.mark.slow
def test_a_resumed_run_tries_dynamic_quantization_as_late_as_a_whole_one(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(512, 2)).eval()
    data, evaluated = list(torch.randn(4, 8, 8, 8, 8)), []

    def metric(each, stop=3):
        evaluated.append(each)
        if len(evaluated) == stop:
            raise KeyboardInterrupt
        return 0.0

    settings = {"target": "onnxruntime", "evaluate": metric, "max_drop": -1.0, "progress": False, "directory": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        qtk.quantize(net, data, **settings)
    _, account = qtk.quantize(net, data, **settings)
    steps = [trial.step for trial in account.trials]
    assert steps.index("dynamic quantization") > 1


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("other", [{"evaluate": lambda net: 0.5}, {"scheme": "mse"}, {"data": BATCHES[::-1]}])
def test_results_of_another_run_are_not_taken_for_this_one(other, tmp_path):
    settings = {"data": BATCHES, "evaluate": lambda net: 1.0, "directory": tmp_path, "progress": False}
    qtk.quantize(model(), **settings)
    with pytest.raises(ConfigError, match="is of another run"):
        qtk.quantize(model(), **settings | other)


@pytest.mark.slow
def test_a_function_for_valid_tokens_is_the_same_in_the_next_process(tmp_path):
    def all_tokens():
        return lambda batch: torch.ones(batch.shape[:2], dtype=torch.bool)

    data, net = [torch.randn(4, 3, 16) for _ in range(3)], nn.Linear(16, 4).eval()
    for _ in range(2):
        qtk.quantize(net, data, valid=all_tokens(), directory=tmp_path, progress=False)


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x, mask):
        return self.linear(x).relu()


@pytest.mark.medium
def test_tokens_that_do_not_count_are_no_error():
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[:, 2:] = False
    data = [(torch.randn(4, 3, 16).masked_fill(~mask[..., None], 1000.0), mask) for _ in range(4)]
    sim, account = qtk.quantize(Padded().eval(), data, valid="mask", max_drop=0.01, progress=False)
    assert account.reached
    assert len(account.trials) == 1
    inputs = data[-1]
    got = sim.model(*inputs).detach()[mask]
    with in_mode(sim.simulation.quantizers.values(), Mode.BYPASS):
        expected = sim.model(*inputs).detach()[mask]
    error = float((expected - got).square().sum() / expected.square().sum())
    assert account.best.drop == pytest.approx(error, rel=1e-4)
    found = qtk.assign_bits(sim, data, budget={"weight_bits": 8}, choices=(4, 8), valid="mask", progress=False)
    assert min(row.loss for row in found.measured) < 0.01


class Scalar(nn.Module):
    """Its output has no axis of samples, so that nothing can be ranked by gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        return self.linear(x).square().mean()


@pytest.mark.medium
def test_a_ranking_that_fails_leaves_what_was_found():
    sim, account = qtk.quantize(Scalar().eval(), BATCHES, weight_bits=4, activation_bits=5, max_drop=-1.0,
                                progress=False)
    assert account.trials[-1].step == "ranking the sites"
    assert account.trials[-1].reason.startswith("failed: CalibrationError: ")
    assert sim.model(BATCHES[0]).ndim == 0


@pytest.mark.medium
def test_nothing_is_ranked_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr("qtk.auto.trial_builder.sensitivity", None)
    _, account = qtk.quantize(model(50.0), BATCHES, weight_bits=4, activation_bits=4, max_drop=0.0, time_limit=0.0,
                              progress=False)
    assert len(account.trials) == 1


@pytest.mark.medium
def test_time_is_limited():
    _, account = qtk.quantize(model(50.0), BATCHES, weight_bits=4, activation_bits=4, max_drop=0.0, time_limit=0.0,
                              progress=False)
    assert [trial.step for trial in account.trials] == ["plain calibration"]
    assert "the time is over" in account.end


@pytest.mark.medium
def test_run_times_are_not_estimated_when_the_time_is_over(monkeypatch):
    clock, estimated, price = [0.0], [], TrialBuilder.price

    def slow(self, choices, sim=None):
        if choices.precise and sim is None:
            clock[0] += 30.0
            estimated.append(choices)
        return price(self, choices, sim)

    monkeypatch.setattr(TrialBuilder, "price", slow)
    for steps in ("TRIED_SCHEMES", "TRIED_TRANSFORMS", "CHAINS"):  # which are tried before run times are estimated
        monkeypatch.setattr(f"qtk.auto.trial_order.{steps}", ())
    monkeypatch.setattr("qtk.auto.quantize.time", SimpleNamespace(monotonic=lambda: clock[0]))
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    settings = {"weight_bits": 4, "activation_bits": 8, "max_drop": 0.0, "progress": False}
    batches = [torch.randn(16, 8) for _ in range(4)]
    _, account = qtk.quantize(net, batches, time_limit=10.0, **settings)
    assert len(estimated) == 1
    assert "precise" not in account.trials[-1].step
    assert "the time is over" in account.end
    clock[0] = 0.0
    _, account = qtk.quantize(net, batches, **settings)
    assert len(estimated) > 4
    assert "precise" in account.trials[-1].step


@pytest.mark.medium
def test_half_of_the_time_is_for_precise_sites(monkeypatch):
    clock, build = [0.0], TrialBuilder.simulation

    def simulation(self, choices):
        clock[0] += 30.0
        return build(self, choices)

    monkeypatch.setattr(TrialBuilder, "simulation", simulation)
    monkeypatch.setattr("qtk.auto.quantize.time", SimpleNamespace(monotonic=lambda: clock[0]))
    settings = {"weight_bits": 4, "activation_bits": 4, "max_drop": 0.0, "progress": False}
    _, account = qtk.quantize(model(50.0), BATCHES, time_limit=130.0, **settings)
    tried = [trial.step for trial in account.trials if trial.seconds]
    assert tried == ["plain calibration", "ranges by mse", "ranges by tf_enhanced", "the worst site precise"]
    left_out = [trial.reason for trial in account.trials if not trial.seconds]
    assert len(left_out) > 3
    assert all(reason.startswith("left out: half of the time is over") for reason in left_out)


@pytest.mark.slow
def test_pairs_go_through_forward_everywhere():
    pairs = [(batch, 0) for batch in BATCHES]
    sim, _ = qtk.quantize(model(50.0), pairs, weight_bits=4, activation_bits=4, max_drop=0.0,
                          example_inputs=BATCHES[0], forward=lambda net, batch: net(batch[0]), progress=False)
    expected, _ = qtk.quantize(model(50.0), BATCHES, weight_bits=4, activation_bits=4, max_drop=0.0, progress=False)
    assert torch.equal(sim.model(BATCHES[0]), expected.model(BATCHES[0]))


@pytest.mark.medium
@pytest.mark.parametrize(("settings", "match"), [
    ({"data": []}, "at least 2 batches are needed, got 0"),
    ({"data": BATCHES[:1]}, "at least 2 batches are needed, got 1"),
    ({"data": 3}, "must be an iterable of batches"),
    ({"data": itertools.repeat(BATCHES[0])}, "more than 2048 batches"),
    ({"holdout": 1.0}, "above 0 and below 1, got 1.0"),
    ({"max_drop": float("nan")}, "got nan"),
    ({"target": "onnxruntim"}, "did you mean 'onnxruntime'"),
    ({"directory": __file__}, "cannot hold the trials"),
    ({"num_batches": 0}, "num_batches must be at least 1"),
    ({"forward": lambda net, batch: net(batch)}, "say example_inputs too"),
])
def test_mistakes_are_named(settings, match):
    with pytest.raises((CalibrationError, ConfigError), match=match):
        qtk.quantize(model(), **{"data": BATCHES, "progress": False, **settings})


def outliers():
    """Layers whose input has a wide range in one batch alone, so that one range for all batches loses the others."""
    torch.manual_seed(0)
    data = [batch * (1000.0 if index == 1 else 1.0) for index, batch in enumerate(BATCHES)]
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), data


@pytest.mark.medium
def test_dynamic_quantization_is_tried_second_with_size_and_latency_beside_plain_calibration():
    net, data = outliers()
    sim, account = qtk.quantize(net, data, progress=False)
    assert [trial.step for trial in account.trials] == ["plain calibration", "dynamic quantization"]
    assert account.reached
    assert "dynamic quantization" in account.end
    assert sim.quantizers["0:in[0]"].spec.dynamic
    assert all(trial.size_bytes > 0 and trial.latency_ms > 0 for trial in account.trials)


@pytest.mark.medium
@pytest.mark.parametrize("options", [
    *(pytest.param(each, marks=pytest.mark.slow) for each in ({"target": "default"}, {"activation_bits": 16})),
    {"target": {"version": 1, "extends": "onnxruntime", "exclude": ["2"]}},
])
def test_it_is_not_tried_where_the_runtime_has_none_or_the_config_is_ones_own(options):
    net, data = outliers()
    _, account = qtk.quantize(net, data, max_drop=-1.0, time_limit=1.0, progress=False, **options)
    assert "dynamic quantization" not in [trial.step for trial in account.trials]


@pytest.mark.medium
def test_a_directory_is_of_sequences_that_begin_where_these_do(tmp_path):
    class Sum(nn.Module):
        def forward(self, x, total):
            return x.relu(), total + x

    batches = [(torch.ones(2, 1) * index, torch.zeros(2, 1)) for index in range(12)]
    settings = {"states": {"total": 1}, "max_drop": 1.0, "directory": tmp_path, "progress": False}
    for _ in range(2):
        qtk.quantize(Sum(), qtk.Sequences(batches, reset=3), **settings)
    with pytest.raises(ConfigError, match="sequences differ"):  # the last three judge, as before
        qtk.quantize(Sum(), qtk.Sequences(batches, reset=9), **settings)


@pytest.mark.medium
def test_scores_per_sample_are_promised_and_too_few_are_said_to_be(tmp_path):
    net, calls = model(), []
    unseen = torch.randn(1000, 16, generator=torch.Generator().manual_seed(1))
    wanted = net(unseen).argmax(1)

    def is_right(count):
        def scores(each):
            calls.append(each)
            return each(unseen[:count]).argmax(1) == wanted[:count]
        return scores

    settings = {"max_drop": 0.05, "progress": False}
    _, account = qtk.quantize(net, BATCHES, evaluate=is_right(1000), labels=wanted, directory=tmp_path, **settings)
    assert account.reached
    assert account.best.bound <= 0.05
    assert sum(count for _, _, count in account.classes) == 1000
    calls.clear()
    _, again = qtk.quantize(net, BATCHES, evaluate=is_right(1000), labels=wanted, directory=tmp_path, **settings)
    assert len(calls) == 2  # the float model, twice
    assert again.best.bound == account.best.bound
    _, few = qtk.quantize(net, BATCHES, evaluate=is_right(40), **settings)
    assert not few.reached
    assert few.best.bound > 0.05
    assert len(few.trials) == 1
    assert few.end.startswith("not promised, 0 measured where the search looks, by min_max, about ")
    assert few.end.endswith("samples, scored by evaluate, would show 0.05")
