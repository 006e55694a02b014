"""The search of settings, judged by metrics of language models."""

import pytest

import qtk
from qtk.auto.token_metric import token_metric
from qtk.errors import ArgumentError
from tests.workflow.language_model import LanguageModel, simulation, token_batch

BATCHES = [token_batch(seed) for seed in range(4)]


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["kl", "perplexity"])
def test_the_drop_is_how_much_it_rises_on_the_held_out_batches(name):
    model = LanguageModel().eval()
    sim, account = qtk.quantize(model, BATCHES, target="default", evaluate=name, max_drop=1e9, progress=False,
                                weight_bits=4, activation_bits=None)
    assert account.metric == name
    held_out = BATCHES[-1:]
    expected = float(qtk.divergence(sim, held_out, progress=False)) if name == "kl" else (
        qtk.perplexity(sim, held_out, progress=False) - qtk.perplexity(model, held_out, progress=False))
    assert account.best.drop == pytest.approx(expected, rel=1e-4)
    assert account.best.drop != 0


@pytest.mark.medium
def test_higher_is_better():
    sim, model = simulation(), LanguageModel().eval()
    metric = token_metric("kl", model, BATCHES, None, "attention_mask")
    assert metric(sim.model) < metric(model) == 0.0


def test_masks_of_two_sides_and_other_names():
    with pytest.raises(ArgumentError, match="is for decoders, with the tokens of one mask"):
        token_metric("kl", LanguageModel(), BATCHES, None, ["attention_mask", "decoder_attention_mask"])
    with pytest.raises(ArgumentError, match="evaluate must be"):
        qtk.quantize(LanguageModel(), BATCHES, evaluate="accuracy", progress=False)
