"""Multiplications against torch's own counter, and operands against what the models compute."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import qtk
from qtk.auto.matrix_products import matrix_products
from tests.zoo.models import ZOO
from tests.zoo.prepared import simulated, slow_but


def found(sim, x):
    products = matrix_products(sim.simulation, lambda: sim.model(x))
    return {tuple(None if site is None else site.name for site in each.operands): each for each in products}


def calibrated(model, x, **options):
    sim = qtk.QuantSim(model.eval(), x, **options)
    sim.compute_encodings([x], progress=False)
    return sim


def flops(run):
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # it counts no other
        run()
    return counter.get_total_flops()


@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(["residual", "inverted_residual", "vit", "fused_attention", "tied"], "vit",
                                          "residual"))
@pytest.mark.parametrize("batch", [1, 3])
def test_as_many_multiplications_as_torch_counts(name, batch):
    sim, entry = simulated(name), ZOO[name]
    model = entry.model()
    products = matrix_products(sim.simulation, lambda: entry.run(sim.model, batch))
    assert 2 * sum(each.multiplications for each in products) == flops(lambda: entry.run(model, batch))


def test_transposed_and_grouped_convolutions():
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2), nn.Conv2d(6, 6, 3, groups=3))
    x = torch.randn(2, 4, 5, 5)
    products = found(calibrated(model, x), x)
    assert 2 * sum(each.multiplications for each in products.values()) == flops(lambda: model(x))
    assert list(products) == [("input:input", "0.weight"), ("0:out", "1.weight")]


@pytest.mark.medium
def test_steps_of_a_loop_count():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    x = torch.randn(2, 7, 3)
    products = found(calibrated(Net(), x), x)
    assert {operands: each.multiplications for operands, each in products.items()} == {
        ("x:input", "lstm.weight_ih_l0"): 2 * 7 * 3 * 20,
        ("lstm.l0.cell.hidden:out", "lstm.weight_hh_l0"): 2 * 7 * 5 * 20,
        ("lstm.l0.cell.hidden:out", "head.weight"): 2 * 5 * 2,
    }
    assert products["lstm.l0.cell.hidden:out", "lstm.weight_hh_l0"].calls == 7


@pytest.mark.medium
def test_attention_reads_what_its_composite_is_given():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    x = torch.randn(2, 5, 8)
    products = found(calibrated(Net(), x), x)
    assert products["q:out", "k:out"].multiplications == 2 * 2 * 5 * 5 * 4
    assert [other for data, other in products if data.endswith("softmax:out")] == ["v:out"]


def test_what_is_float_has_no_site():
    x = torch.randn(2, 8)
    assert list(found(calibrated(nn.Linear(8, 4), x, weight_bits=None), x)) == [("input:input", None)]
