"""The LSTM against loops over the rows of an image, downwards and upwards, in float64."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from qtk.demo.models import build
from qtk.demo.small_lstm import SmallLstm


def run(lstm: nn.LSTM, suffix: str, steps: Iterable[Tensor]) -> list[Tensor]:
    """The state after each step, by the four gates of an LSTM; ``suffix`` names layer and direction."""
    of = dict(lstm.named_parameters())
    h = c = torch.zeros(1, lstm.hidden_size, dtype=torch.float64)
    states = []
    for x in steps:
        inputs = x @ of[f"weight_ih_{suffix}"].T + of[f"bias_ih_{suffix}"]
        i, f, g, o = (inputs + h @ of[f"weight_hh_{suffix}"].T + of[f"bias_hh_{suffix}"]).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        states.append(h)
    return states


@torch.no_grad()
def test_rows_are_time_steps_read_in_both_directions() -> None:
    model = build("digits_lstm").double()
    assert isinstance(model, SmallLstm)
    images = torch.rand(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    steps = list(images[:, 0].unbind(1))
    for layer in range(2):
        down = run(model.lstm, f"l{layer}", steps)
        up = run(model.lstm, f"l{layer}_reverse", reversed(steps))[::-1]
        steps = [torch.cat(states, 1) for states in zip(down, up, strict=True)]
    mean = sum(steps, torch.zeros(())) / 8
    torch.testing.assert_close(model(images), model.head(model.norm(mean)))
