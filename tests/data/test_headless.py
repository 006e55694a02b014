"""Outputs that are hidden states."""

import pytest
import torch
from torch import nn

import qtk
from qtk.data.headless import embedding_shapes, refuse_hidden_states, refuse_other_words
from qtk.errors import CalibrationError


@pytest.mark.medium
def test_embeddings_of_a_model_and_of_its_prepared_form():
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)).eval()
    prepared = qtk.prepare_model(model, torch.zeros(2, 3, dtype=torch.long), verify=False)
    assert embedding_shapes(model) == embedding_shapes(prepared) == {(50, 16)}
    assert embedding_shapes(nn.Linear(4, 4)) == frozenset()


@pytest.mark.parametrize(("embeddings", "width", "largest_id", "hidden"), [
    ({(50, 16)}, 50, 49, False), ({(50, 16)}, 16, 49, True), ({(50, 16)}, 16, 15, False), ({(8, 16)}, 16, 7, True),
    ({(16, 16), (8, 16)}, 16, 15, False),  # positions
    ({(50, 16), (8, 16)}, 16, 9, False), ({(50, 16)}, 20, 49, False), (set(), 16, 49, False),
])
def test_an_output_as_wide_as_an_embedding(embeddings, width, largest_id, hidden):
    logits, ids = torch.zeros(1, 2, width), torch.tensor([[0, largest_id]])
    if hidden:
        with pytest.raises(CalibrationError, match=rf"returns {width} numbers for each token, as many as"):
            refuse_hidden_states(logits, ids, embeddings)
    else:
        refuse_hidden_states(logits, ids, embeddings)


def test_tokens_that_are_not_among_the_logits():
    logits = torch.zeros(1, 2, 5)
    refuse_other_words(logits, torch.tensor([0, 4]))
    refuse_other_words(logits, torch.tensor([], dtype=torch.long))
    for token in (5, -100):
        with pytest.raises(CalibrationError, match=rf"the token id {token} is none of the 5 numbers"):
            refuse_other_words(logits, torch.tensor([0, token]))
