"""Token ids, masks, logits and texts."""

import pytest
import torch

from qtk.data.token_batches import TokenBatch, is_encoder_decoder, logits_of, token_batches
from qtk.errors import CalibrationError

IDS = torch.arange(12).reshape(3, 4)
MASK = IDS % 4 < 3


@pytest.mark.parametrize("batch", [
    IDS, (IDS,), (torch.randn(3, 4), IDS), {"input_ids": IDS}, {"position_ids": IDS + 1, "input_ids": IDS}, {"x": IDS},
    {"token_mask": IDS > 2, "x": IDS},
])
def test_the_ids_of_a_batch(batch):
    tokens = TokenBatch.of(batch)
    assert tokens.ids is IDS
    assert tokens.counted.all()


@pytest.mark.parametrize("batch", [torch.randn(3, 4), torch.arange(4), (), "text", {"input_ids": [1, 2]}])
def test_a_batch_without_ids(batch):
    with pytest.raises(CalibrationError, match="a batch must hold token ids"):
        TokenBatch.of(batch)


def test_padding_is_left_out():
    assert torch.equal(TokenBatch.of({"input_ids": IDS, "attention_mask": MASK.long()}).counted, MASK)
    assert torch.equal(TokenBatch.of({"input_ids": IDS, "keep": MASK}, "keep").counted, MASK)
    assert torch.equal(TokenBatch.of(IDS, lambda batch: batch % 4 < 3).counted, MASK)
    four_axes = {"input_ids": IDS, "attention_mask": torch.ones(3, 1, 4, 4)}
    assert TokenBatch.of(four_axes).counted.all()


@pytest.mark.parametrize(("batch", "valid"), [
    ({"input_ids": IDS}, "attention_mask"), (IDS, "attention_mask"), (IDS, lambda batch: batch[0]),
])
def test_a_mask_that_is_none(batch, valid):
    with pytest.raises(CalibrationError, match=r"must give a mask of the token ids, \(3, 4\), got"):
        TokenBatch.of(batch, valid)


SOURCE = IDS + 20
LABELS = IDS.masked_fill(IDS % 5 == 4, -100)


@pytest.mark.parametrize(("batch", "decodes", "targets", "count"), [
    ({"decoder_input_ids": IDS}, None, IDS[:, 1:], 9),
    ({"decoder_input_ids": IDS, "decoder_attention_mask": MASK, "attention_mask": ~MASK}, None, IDS[:, 1:], 6),
    ({"decoder_input_ids": IDS - 1, "labels": LABELS}, None, LABELS, 10), ({"labels": LABELS}, None, LABELS, 10),
    ({"labels": SOURCE}, True, SOURCE, 12),  # of an encoder that gives its input again
    ({"labels": torch.arange(3)}, None, SOURCE[:, 1:], 9), ({"labels": SOURCE}, None, SOURCE[:, 1:], 9),
    ({"labels": SOURCE.masked_fill(MASK, -100)}, None, SOURCE[:, 1:], 9), ({"labels": LABELS}, False, SOURCE[:, 1:], 9),
    ({"labels": torch.cat([SOURCE[:, 1:], torch.full((3, 1), -100)], 1)}, None, SOURCE[:, 1:], 9),
])
def test_the_tokens_of_which_a_model_returns_logits(batch, decodes, targets, count):
    tokens = TokenBatch.of({"input_ids": SOURCE, **batch}, is_encoder_decoder=decodes)
    found, scored = tokens.targets()
    assert torch.equal(found[:, :targets.shape[1]], targets)
    assert scored.sum() == count
    assert (found[scored] >= 0).all()


def test_an_encoder_decoder_needs_the_tokens_of_its_decoder():
    assert is_encoder_decoder(torch.nn.Linear(2, 2)) is None
    with pytest.raises(CalibrationError, match="give the batches decoder_input_ids or labels"):
        TokenBatch.of({"input_ids": IDS}, is_encoder_decoder=True)


def test_hidden_states_of_transformers_are_no_logits():
    hidden = torch.randn(3, 4, 7)
    with pytest.raises(CalibrationError, match="returns last_hidden_state, and no logits"):
        logits_of({"last_hidden_state": hidden})
    logits = torch.randn(3, 4, 9)
    assert logits_of({"last_hidden_state": hidden, "logits": logits}) is logits


def test_logits_are_found_beside_losses_caches_and_hidden_states():
    logits, cache = torch.randn(3, 4, 7), torch.randn(3, 2, 4, 5)
    assert TokenBatch.all_of(IDS).logits({"loss": torch.tensor(1.0), "logits": logits, "cache": [cache]}) is logits
    assert logits_of((torch.zeros(2, 3, 4, 5), logits)) is logits
    with pytest.raises(CalibrationError, match=r"for the token ids \(3, 4\), it returns \(4, 3, 7\)"):
        TokenBatch.all_of(IDS).logits(logits.mT.transpose(0, 2).contiguous().reshape(4, 3, 7))
    with pytest.raises(CalibrationError, match="it returns no tensor"):
        logits_of(None)


def test_a_text_is_cut_into_samples(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij\u00e9", encoding="utf-8")

    def tokenizer(text):
        return [ord(letter) for letter in text]

    batches = list(token_batches(path, tokenizer, 4))
    assert [batch.tolist() for batch in batches] == [[list(b"abcd")], [list(b"efgh")]]
    for other in (lambda text: {"input_ids": tokenizer(text)}, lambda text: torch.tensor([tokenizer(text)])):
        assert torch.equal(torch.cat(list(token_batches(str(path), other, 4))), torch.cat(batches))


@pytest.mark.parametrize(("tokenizer", "length", "message"), [
    (None, 4, "needs a tokenizer"), (lambda text: [1] * 3, 4, "has 3 tokens, fewer than a sample of 4"),
    (lambda text: [1] * 3, 1, "length must be at least 2"), (lambda text: [0.5], 2, "must return the token ids"),
    (lambda text: "text", 2, "must return token ids, got str"), (lambda text: {}, 2, "must return token ids, got None"),
    (lambda text: torch.zeros(3, 3, dtype=torch.long), 2, r"of shape \(3, 3\)"),
])
def test_a_text_that_gives_no_samples(tmp_path, tokenizer, length, message):
    (tmp_path / "text.txt").write_text("abc")
    with pytest.raises(CalibrationError, match=message):
        token_batches(tmp_path / "text.txt", tokenizer, length)


def test_a_missing_text_and_settings_of_a_text_without_one(tmp_path):
    with pytest.raises(CalibrationError, match="cannot read the text"):
        token_batches(tmp_path / "text.txt", list, 4)
    for settings in ({"tokenizer": list, "length": None}, {"tokenizer": None, "length": 4}):
        with pytest.raises(CalibrationError, match="is for the path of a text file"):
            token_batches([IDS], **settings)
    assert token_batches(IDS, None, None) == [IDS]
