"""The work of methods: by it ranks share layers, and forecasts are made."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import qtk
from qtk.layerwise import run
from qtk.layerwise.adaround import AdaRound
from qtk.layerwise.bias_correction import BiasCorrection
from qtk.layerwise.coordinate_descent import CoordinateDescent
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.method_work import WORK, multiplications, relative_cost
from qtk.layerwise.reconstruction import Reconstruction
from qtk.layerwise.seq_mse import SeqMse


def test_products_count_each_output_and_cubes_each_gram_matrix():
    gptq = [WORK[Gptq]]
    assert multiplications(gptq, 1, 0, 64, 64) == 64**3
    assert multiplications(gptq, 3, 10, 64, 64) == 3 * (64**3 + 5 * 10 * 64**2)
    assert multiplications(gptq, 1, 10, 64, 16) == 64 * 16**2 + 5 * 10 * 64 * 16
    assert multiplications([*gptq, WORK[AdaRound]], 1, 1, 8, 8) == 2.5 * 8**3 + 125 * 8**2


def test_layers_of_a_method_whose_products_count_most_cost_as_their_outputs():
    wide, long = (768, 256, 256), (256, 768, 768)  # gate and down of a decoder
    ratio = relative_cost([AdaRound()], 1, *long) / relative_cost([AdaRound()], 1, *wide)
    assert ratio == pytest.approx(3, rel=0.1)
    assert relative_cost([Gptq()], 1, *long) > 4 * relative_cost([Gptq()], 1, *wide)


def test_a_method_that_is_not_listed_costs_something():
    assert Reconstruction not in WORK
    assert relative_cost([Reconstruction()], 1, 4, 8, 8) == 8**3 + 4 * 8**2


def peak_bytes(function):
    """The most bytes of tensors that ``function`` holds at a time beyond what there is before, by torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = function()
    events = [each for each in recorded.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = torch.tensor([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]).cumsum(0)
    return int(held.max()), result


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("method", [Gptq(), CoordinateDescent(), SeqMse(), BiasCorrection(), AdaRound(iterations=3)])
def test_matrices_at_a_time_are_what_a_method_allocates(method, monkeypatch):
    solve, peaks = run.compute_update, list[int]()

    def solved(*arguments):
        peak, update = peak_bytes(lambda: solve(*arguments))
        peaks.append(peak)
        return update

    monkeypatch.setattr(run, "compute_update", solved)
    for outputs, columns in [(384, 768), (768, 384), (128, 768)]:
        torch.manual_seed(0)
        mixed = torch.linspace(0, 1, columns).pow(6)[:, None] * torch.randn(columns, columns) / columns**0.5
        batches = [(torch.randn(256, columns) @ mixed).bfloat16() for _ in range(4)]
        sim = qtk.QuantSim(nn.Linear(columns, outputs).bfloat16().eval(), batches[0], config="vllm_w4a16")
        sim.compute_encodings(None, progress=False)
        qtk.apply_layerwise(sim, batches, [method], progress=False)
        work = WORK[type(method)]
        counted = 4 * (work.grams * columns**2 + work.weights * outputs * columns)
        assert 0.8 < peaks[-1] / counted < 1.2
