import pytest
import torch
from torch import nn

import qtk
from qtk.data.batch_advice import batch_advice
from qtk.errors import CalibrationError


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, mask):
        return self.layer(x) * mask


LABEL = torch.zeros(3, dtype=torch.float64)
X = torch.zeros(3, 4)


@pytest.mark.parametrize(("batch", "advice"), [
    ({"label": LABEL, "image": X}, "model(batch['image'])"),
    ({"x": X, "mask": X[:, :2], "label": LABEL}, "no input 'label': pass forward=lambda model, batch: "
                                                 "model(x=batch['x'], mask=batch['mask'])"),
    ({"x": X.double(), "mask": X}, "the batch has float64, the model float32: convert its tensors"),
    ((X, X[:, :2], LABEL.float()), "model(batch[0])"), ((X.half(), X), "the batch has float16, the model float32"),
])
def test_it_says_what_the_batch_shows(batch, advice):
    assert advice in batch_advice(Pair(), batch)


def test_of_a_batch_as_the_model_takes_it_nothing_is_said():
    assert batch_advice(Pair(), {"x": X, "mask": X}) == ""
    assert batch_advice(nn.Linear(4, 2), X) == ""


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_batch_of_another_float_type_is_told_from_one_with_labels(dtype):
    sim = qtk.QuantSim(nn.Linear(4, 2).eval(), X)
    with pytest.raises(CalibrationError, match=r"the model float32: convert it, e.g. with batch.to\(torch.float32\)$"):
        sim.compute_encodings([X.to(dtype)], progress=False)
