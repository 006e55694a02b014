"""Perplexity against a loop over tokens in float64."""

import math

import pytest
import torch

import qtk
from qtk.errors import ArgumentError, CalibrationError
from tests.workflow.language_model import LanguageModel, simulation, token_batch


def by_hand(model, batches):
    """Token by token, in float64; a token counts if it and the one before it are no padding."""
    losses = []
    for batch in batches:
        logits = model(**batch)["logits"].detach().double()
        for logit, ids, mask in zip(logits, batch["input_ids"], batch["attention_mask"], strict=True):
            for place in range(1, len(ids)):
                if mask[place] and mask[place - 1]:
                    losses.append(math.log(sum(logit[place - 1].exp().tolist())) - float(logit[place - 1, ids[place]]))
    return math.exp(sum(losses) / len(losses))


@pytest.mark.medium
def test_it_is_that_of_a_loop_in_float_and_simulated():
    batches = [token_batch(0), token_batch(1, 2)]
    model, sim = LanguageModel().eval(), simulation()
    expected, simulated = by_hand(model, batches), by_hand(sim.model, batches)
    assert qtk.perplexity(model, batches, progress=False) == pytest.approx(expected, rel=1e-6)
    assert qtk.perplexity(sim, batches, progress=False) == pytest.approx(simulated, rel=1e-6)
    assert qtk.perplexity(sim.model, batches, num_batches=1, progress=False) == pytest.approx(
        by_hand(sim.model, batches[:1]), rel=1e-6)
    assert abs(expected - simulated) > 1e-3


def test_a_text_and_a_tensor(tmp_path):
    model = LanguageModel().eval()
    (tmp_path / "text.txt").write_text("what is said is said again and again")

    def tokenizer(text):
        return [ord(letter) % 23 for letter in text]

    found = qtk.perplexity(model, tmp_path / "text.txt", tokenizer=tokenizer, length=6, progress=False)
    ids = torch.tensor(tokenizer("what is said is said again and again")).reshape(6, 6)
    assert found == pytest.approx(qtk.perplexity(model, ids, progress=False), rel=1e-6)
    assert found == pytest.approx(
        by_hand(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]), rel=1e-6)


def test_what_cannot_be_measured():
    model, batch = LanguageModel().eval(), token_batch(0)
    with pytest.raises(CalibrationError, match="no token counts"):
        qtk.perplexity(model, {**batch, "attention_mask": torch.zeros(3, 9, dtype=torch.long)}, progress=False)
    with pytest.raises(CalibrationError, match="the model must return logits"):
        qtk.perplexity(model, batch, forward=lambda model, batch: model(**batch)["logits"][:, 0], progress=False)
    with pytest.raises(ArgumentError, match="tokenizer must be"):
        qtk.perplexity(model, batch, tokenizer="bert", progress=False)


class EncoderDecoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(23, 16), torch.nn.Linear(16, 23)

    def forward(self, input_ids, decoder_input_ids, labels=None):
        return self.head(self.embed(decoder_input_ids) + self.embed(input_ids).mean(1, keepdim=True))


def test_an_encoder_decoder_is_scored_by_the_tokens_of_its_decoder():
    model, (source, ids) = EncoderDecoder().eval(), torch.randint(0, 23, (2, 3, 6))
    logits = model(source, ids).detach().double()
    loss = torch.nn.functional.cross_entropy
    expected = math.exp(loss(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    batch = {"input_ids": source, "decoder_input_ids": ids}
    assert qtk.perplexity(model, batch, progress=False) == pytest.approx(expected, rel=1e-6)
    labels = ids.roll(-1, 1).masked_fill(ids > 15, -100)
    expected = math.exp(loss(logits.flatten(0, 1), labels.flatten(), ignore_index=-100))
    assert qtk.perplexity(model, {**batch, "labels": labels}, progress=False) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("words", "message"), [(64, "the token id|as many as its embedding"), (8, "as many as its")])
def test_a_model_without_a_head(words, message):
    ids = torch.arange(words).reshape(1, -1)
    with pytest.raises(CalibrationError, match=message):
        qtk.perplexity(torch.nn.Embedding(words, 16), ids, progress=False)


def test_certain_and_hopeless_models():
    ids = torch.tensor([[0, 1, 2]])
    sure = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0]]), 4).float() * 1e4

    def forward(model, batch):
        return sure

    assert qtk.perplexity(LanguageModel(), ids, forward=forward, progress=False) == 1.0
    assert qtk.perplexity(LanguageModel(), ids.flip(1), forward=forward, progress=False) == math.inf
