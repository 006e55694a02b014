"""One time step against torch's own cells, and every value with the module that is named after it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtk.nn.recurrent_cells import GruCell, LstmCell, RnnCell

N, I, H, P = 3, 4, 6, 2  # noqa: E741
CASES = {
    "lstm": (LstmCell, lambda bias: nn.LSTMCell(I, H, bias=bias)),
    "gru": (GruCell, lambda bias: nn.GRUCell(I, H, bias=bias)),
    "rnn_tanh": (lambda: RnnCell(nn.Tanh()), lambda bias: nn.RNNCell(I, H, bias=bias)),
    "rnn_relu": (lambda: RnnCell(nn.ReLU()), lambda bias: nn.RNNCell(I, H, bias=bias, nonlinearity="relu")),
}


def setting(name, bias, dtype):
    """torch's cell, ours, an input and the states."""
    torch.manual_seed(0)
    ours, torchs = (make() if make is CASES[name][0] else make(bias) for make in CASES[name])
    x = torch.randn(N, I, dtype=dtype)
    states = [torch.randn(N, H, dtype=dtype, requires_grad=True) for _ in range(2 if name == "lstm" else 1)]
    return torchs.to(dtype), ours, x, states


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_torch_with_gradients(name, bias, dtype, tolerance):
    torchs, ours, x, states = setting(name, bias, dtype)
    following = torchs(x, tuple(states) if name == "lstm" else states[0])
    expected = following if name == "lstm" else (following,)
    found = ours(F.linear(x, torchs.weight_ih, torchs.bias_ih), *states, torchs.weight_hh, torchs.bias_hh)
    leaves = [*states, *torchs.parameters()]
    gradients = []
    for result in (expected, found):
        total = sum((value * torch.linspace(-1, 1, H, dtype=dtype)).sum() for value in result)
        gradients.append(torch.autograd.grad(total, leaves))
    for a, b in zip((*expected, *gradients[0]), (*found, *gradients[1]), strict=True):
        assert a.shape == b.shape
        assert float((a - b).detach().abs().max()) < tolerance * max(1.0, float(a.detach().abs().max())) * 4


def test_a_projection_acts_on_what_is_handed_out_not_on_the_cell_state():
    torch.manual_seed(0)
    net = nn.LSTM(I, H, proj_size=P).double()
    x, hidden, cell = (torch.randn(N, size, dtype=torch.float64) for size in (I, P, H))
    _, expected = net(x[None], (hidden[None], cell[None]))
    projected = F.linear(x, net.weight_ih_l0, net.bias_ih_l0)
    found = LstmCell()(projected, hidden, cell, net.weight_hh_l0, net.bias_hh_l0, net.weight_hr_l0)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a[0], b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_every_inner_value_is_handed_on_by_a_module_that_may_change_it(name):
    torchs, ours, x, states = setting(name, True, torch.float32)
    arguments = (F.linear(x, torchs.weight_ih, torchs.bias_ih), *states, torchs.weight_hh, torchs.bias_hh)
    expected = ours(*arguments)
    children = [child for label, child in ours.named_children() if label != "output_projection"]  # not projected here
    for child in children:
        handle = child.register_forward_hook(lambda module, args, out: out + 0.25)
        changed = ours(*arguments)
        handle.remove()
        assert not all(torch.equal(a, b) for a, b in zip(expected, changed, strict=True))


def test_the_four_gates_of_an_lstm_are_torchs_in_torchs_order():
    torchs, ours, x, (hidden, cell) = setting("lstm", True, torch.float64)
    seen = {}
    for label in ("input_gate", "forget_gate", "cell_gate", "output_gate"):
        ours.get_submodule(label).register_forward_hook(lambda m, args, out, label=label: seen.__setitem__(label, out))
    ours(F.linear(x, torchs.weight_ih, torchs.bias_ih), hidden, cell, torchs.weight_hh, torchs.bias_hh)
    sums = F.linear(x, torchs.weight_ih, torchs.bias_ih) + F.linear(hidden, torchs.weight_hh, torchs.bias_hh)
    slices = dict(zip(("input_gate", "forget_gate", "cell_gate", "output_gate"), sums.split(H, -1), strict=True))
    for label, value in slices.items():
        torch.testing.assert_close(seen[label], value.tanh() if label == "cell_gate" else value.sigmoid())
