"""Which channels of its input and output each element of a weight belongs to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from tests.transforms.scaling import Scaled, prepare
from tests.transforms.scaling_nets import batch, net, randomized


@pytest.mark.medium
def test_the_index_says_which_channel_an_element_multiplies() -> None:
    model = net(
        lambda m, x: m.b(F.relu(m.a(F.relu(m.first(x))))), first=nn.Conv1d(1, 4, 1), a=nn.Conv1d(4, 6, 2, groups=2),
        b=nn.ConvTranspose1d(6, 4, 2, groups=2),
    )
    scaled = Scaled(model, batch(1, 5))
    for name, expected in {
        "a.weight": [[[0], [1]]] * 3 + [[[2], [3]]] * 3,
        "b.weight": [[[0]] * 2, [[1]] * 2, [[2]] * 2, [[3]] * 2, [[4]] * 2, [[5]] * 2],
    }.items():
        (read,) = (read for read in scaled.scales.inputs if read.weight == name)
        weight = dict(scaled.model.named_parameters())[name]
        assert read.weight_index is not None
        assert read.weight_index.expand(weight.shape)[..., :1].tolist() == expected
        assert read.channel_axis == 1
    (write,) = (write for write in scaled.scales.outputs if write.weight == "b.weight")
    assert write.weight_index.squeeze(-1).tolist() == [[0, 1]] * 3 + [[2, 3]] * 3


def test_scale_and_shift_absorb_on_both_sides() -> None:
    """Of a norm behind a rectifier that something else reads too, whose scale stays."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(m.first(x))
        return m.last(torch.relu(m.norm(y))) + m.beside(y)

    model = net(forward, first=nn.Conv2d(2, 3, 1), norm=nn.BatchNorm2d(3), last=nn.Conv2d(3, 2, 2, padding=1),
                beside=nn.Conv2d(3, 2, 2, padding=1))
    prepared = prepare(randomized(model), batch(2, 4, 4))
    qtk.fold_batch_norms(prepared)
    scaled = Scaled(prepared, batch(2, 4, 4), prepared=True)
    assert any(write.kind == "scale_shift" for write in scaled.scales.outputs)
    assert int(scaled.scales.free.sum()) == 6
    assert scaled.error(scaled.scaled(scaled.random_factors())) <= 1e-10


LAYERS = {  # layer, shape of an input
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "conv": (lambda: nn.Conv2d(5, 3, 2), (5, 4, 4)),
    "grouped conv": (lambda: nn.Conv1d(4, 6, 2, groups=2), (4, 5)),
    "depthwise conv": (lambda: nn.Conv1d(3, 3, 2, groups=3), (3, 5)),
    "transposed conv": (lambda: nn.ConvTranspose1d(5, 3, 2), (5, 4)),
    "transposed conv of groups": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (4, 4)),
    "one channel": (lambda: nn.Conv1d(1, 1, 1), (1, 4)),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", LAYERS)
def test_an_element_multiplies_the_input_and_reaches_the_output_that_its_indices_say(name: str) -> None:
    """With every other element 0: the outputs that are not 0, and the inputs with a derivative."""
    build, shape = LAYERS[name]
    layer = build().double()
    scaled = Scaled(net(lambda m, x: m.layer(x), layer=layer), batch(*shape))
    ((read,), (write,)) = scaled.scales.inputs, scaled.scales.outputs
    assert read.weight_index is not None
    weight = layer.weight.detach()
    sources, targets = read.weight_index.expand(weight.shape), write.weight_index.expand(weight.shape)
    for flat in range(weight.numel()):
        single = torch.zeros_like(weight).view(-1)
        single[flat] = 1
        axis = 1 if len(shape) > 1 else -1
        x = torch.rand(2, *shape, dtype=torch.float64, requires_grad=True)
        parameters = {"weight": single.view_as(weight), "bias": torch.zeros_like(layer.bias)}
        y = torch.func.functional_call(layer, parameters, x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        reached, used = ({int(index[axis]) for index in values.nonzero()} for values in (y.detach(), gradient))
        assert reached == {int(targets.reshape(-1)[flat])}
        assert used == {int(sources.reshape(-1)[flat])}


class OneBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(self.first(x).relu(), self.weight, self.bias).relu()
        return self.last(torch.addmm(self.bias, x, self.weight.T).relu())


def test_a_bias_of_one_element_is_moved_with_all_outputs() -> None:
    model, x = OneBias().eval(), torch.randn(5, 6)
    prepared, expected = qtk.prepare_model(model, x), model(x)
    qtk.equalize_model(prepared)
    torch.testing.assert_close(prepared(x), expected)
