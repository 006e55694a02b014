"""The GRU against a loop over the rows of an image, in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qtk.demo.models import build
from qtk.demo.small_gru import SmallGru


def step(gru: nn.GRU, layer: int, x_NF: Tensor, h_NH: Tensor) -> Tensor:
    """The next state, by the three gates of a GRU."""
    of = dict(gru.named_parameters())
    inputs = x_NF @ of[f"weight_ih_l{layer}"].T + of[f"bias_ih_l{layer}"]
    hidden = h_NH @ of[f"weight_hh_l{layer}"].T + of[f"bias_hh_l{layer}"]
    (r_in, z_in, n_in), (r_hid, z_hid, n_hid) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    z = torch.sigmoid(z_in + z_hid)
    return (1 - z) * torch.tanh(n_in + torch.sigmoid(r_in + r_hid) * n_hid) + z * h_NH


@torch.no_grad()
def test_rows_are_time_steps_and_the_last_state_answers() -> None:
    model = build("digits_gru").double()
    assert isinstance(model, SmallGru)
    images = torch.rand(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, second = torch.zeros(2, 3, 64, dtype=torch.float64)
    for row in range(8):
        first = step(model.gru, 0, images[:, 0, row], first)
        second = step(model.gru, 1, first, second)
    torch.testing.assert_close(model(images), model.head(model.norm(second)))
