"""Labels are left out wherever the model cannot take them, and nothing else is."""

import pytest
import torch
from torch import nn

import qtk
from qtk.data.labels import without_labels
from qtk.errors import CaptureError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
PAIRS = [(X, torch.arange(6)), (X + 1, torch.arange(6))]


class Masked(nn.Module):
    """One input, and a mask that need not be."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, mask=None):
        scores = self.layer(x)
        return scores if mask is None else scores * mask


class Many(nn.Module):
    def forward(self, *inputs):
        return sum(inputs)


MASKED = qtk.prepare_model(Masked().eval(), X)


@pytest.mark.parametrize(("model", "batch", "kept"), [
    (nn.Linear(4, 2), [X, "label"], 1), (nn.Linear(4, 2), (X, X), 1),
    (nn.Bilinear(4, 4, 2), (X, X, torch.arange(6)), 2),
    (nn.Bilinear(4, 4, 2), (X, X, X), 3),
    (Many(), (X, X), 2), (Masked(), (X, torch.arange(6)), 2), (MASKED, (X, torch.arange(6)), 1),
    (MASKED, (X, torch.ones(6, 2)), 2), (MASKED, (X, [{"boxes": X}]), 1), (MASKED, (X, None), 2),
    (nn.Linear(4, 2), {"input": X, "label": X}, 1), (nn.Linear(4, 2), {"image": X, "label": X}, 2),
    (Masked(), {"x": X, "label": X}, 2),
])
def test_what_is_kept(model, batch, kept):
    assert len(without_labels(model, batch)) == kept


@pytest.mark.medium
def test_pairs_give_what_their_images_give_everywhere():
    torch.manual_seed(0)
    net = nn.Linear(4, 3).eval()
    results = []
    for data in (PAIRS, [image for image, _ in PAIRS]):
        sim = qtk.QuantSim(net, data[0], weight_bits=4)
        sim.compute_encodings(data, progress=False)
        qtk.apply_seq_mse(sim, data, progress=False)
        results.append((sim.model(X), [each.own_sqnr_db for each in sim.compare(data, progress=False)],
                        [each.increase for each in sim.sensitivity(data, top=0, progress=False)]))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


def test_a_loss_sees_the_labels():
    sim = qtk.QuantSim(nn.Linear(4, 6).eval(), X)
    sim.compute_encodings(PAIRS, progress=False)
    seen = []

    def loss(output, batch):
        seen.append(batch[1])
        return nn.functional.cross_entropy(output, batch[1])

    sim.sensitivity(PAIRS, loss=loss, top=0, progress=False)
    assert torch.equal(seen[0], torch.arange(6))


def test_a_mask_is_no_label():
    sim = qtk.QuantSim(MASKED, X)
    with pytest.raises(CaptureError, match="mask was not given when the model was captured"):
        sim.compute_encodings([(X, torch.ones(6, 2))], progress=False)
