"""Divergence against a loop over tokens in float64."""

import copy
import math

import pytest
import torch

import qtk
from qtk.analysis.divergence import _divergence
from qtk.errors import CalibrationError
from tests.workflow.language_model import LanguageModel, simulation, token_batch

BATCHES = [token_batch(0), token_batch(1, 2)]


def by_hand(model, simulated, batches):
    """Place of each token that is no padding → its divergence, in float64."""
    found = {}
    for index, batch in enumerate(batches):
        p, q = (each(**batch)["logits"].detach().double().softmax(-1) for each in (model, simulated))
        for sample, position in batch["attention_mask"].nonzero().tolist():
            of, to = p[sample, position], q[sample, position]
            found[index, sample, position] = float((of * (of / to).log()).sum())
    return found


def agrees(found, expected):
    assert found.tokens == len(expected)
    assert found.mean == pytest.approx(sum(expected.values()) / len(expected), rel=1e-4)
    assert found.worst_at == max(expected, key=expected.get)
    assert found.worst == pytest.approx(max(expected.values()), rel=1e-4)


@pytest.mark.medium
def test_it_is_that_of_a_loop():
    sim, model = simulation(), LanguageModel().eval()
    expected = by_hand(model, sim.model, BATCHES)
    assert min(expected.values()) > 1e-4
    agrees(qtk.divergence(sim, BATCHES, progress=False), expected)
    agrees(qtk.divergence(sim, BATCHES, reference=model, progress=False), expected)
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.head.weight)
    agrees(qtk.divergence(sim, BATCHES, reference=other, progress=False), by_hand(other, sim.model, BATCHES))


@pytest.mark.medium
def test_the_float_model_has_the_weights_from_before_a_layerwise_method():
    sim, model = simulation(), LanguageModel().eval()
    rounded = qtk.divergence(sim, BATCHES, progress=False)
    qtk.apply_gptq(sim, BATCHES, progress=False)
    weight = sim.model.get_parameter("head.weight")
    assert not torch.equal(weight, model.head.weight)
    found = qtk.divergence(sim, BATCHES, progress=False)
    agrees(found, by_hand(model, sim.model, BATCHES))
    assert found.mean < rounded.mean


@pytest.mark.medium
def test_a_simulation_in_float_and_data_of_padding_alone():
    sim = simulation(8)
    for quantizer in sim.quantizers.values():
        quantizer.mode = qtk.Mode.BYPASS
    found = qtk.divergence(sim, BATCHES[0], progress=False)
    assert (found.mean, found.worst, found.tokens) == (0.0, 0.0, 22)
    with pytest.raises(CalibrationError, match="every token of the data is padding"):
        qtk.divergence(sim, {**BATCHES[0], "attention_mask": torch.zeros(3, 9, dtype=torch.long)}, progress=False)
    with pytest.raises(CalibrationError, match=r"logits of shape \(3, 9, 23\), the float model of \(3, 9, 29\)"):
        qtk.divergence(sim, BATCHES[0], reference=LanguageModel(29), progress=False)


def test_the_first_token_that_is_nan_stays_the_worst():
    logits, broken = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    broken[0, 1] = torch.nan
    ids = torch.zeros(1, 2, dtype=torch.long)
    other = torch.arange(8.0).reshape(1, 2, 4)
    outputs = [other, broken, other, broken]
    found = _divergence([(logits, output, ids) for output in outputs], None)
    assert math.isnan(found.mean)
    assert math.isnan(found.worst)
    assert found.worst_at == (1, 0, 1)


def test_hidden_states_have_no_divergence():
    hidden, ids = torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(CalibrationError, match="as many as its embedding of 3 words"):
        _divergence([(hidden, hidden, ids)], None, torch.nn.Embedding(3, 4))
