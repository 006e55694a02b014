"""Recurrent nets against torch's own, fused and step by step."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from qtk.nn.recurrent import Recurrent, RecurrentCell
from qtk.nn.tap import Tap

T, N, I, H, P = 5, 3, 4, 6, 2  # noqa: E741
KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
TORCHS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn_tanh": nn.RNNCell, "rnn_relu": nn.RNNCell}


class Awake(Tap):
    idle = False

    def forward(self, x):
        return x


def nonlinearity(kind):
    return {"nonlinearity": kind.removeprefix("rnn_")} if kind.startswith("rnn") else {}


def pair(kind, *, layers=1, both=False, batch_first=False, bias=True, projected=False, dropout=0.0, stepwise=True):
    """torch's net, its twin, and its parameters sorted as the twin takes them."""
    torch.manual_seed(0)
    options = {"proj_size": P} if projected else {}
    net = TORCHS[kind](I, H, layers, bias=bias, batch_first=batch_first, bidirectional=both, dropout=dropout,
                       **nonlinearity(kind), **options)
    twin = Recurrent(kind, num_layers=layers, bidirectional=both, batch_first=batch_first, dropout=dropout,
                     has_biases=bias, projected=projected)
    if stepwise:
        twin.add_module("awake", Awake())
    weights, biases = [], []
    for parameters in net.all_weights:
        weights += [parameters[0], parameters[1], *(parameters[-1:] if projected else [])]
        biases += list(parameters[2:4]) if bias else []
    return net, twin, weights, biases


def states(kind, layers, both, projected, dtype=torch.float32):
    steps = layers * (1 + both)
    hidden = torch.randn(steps, N, P if projected else H, dtype=dtype)
    return [hidden, torch.randn(steps, N, H, dtype=dtype)] if kind == "lstm" else [hidden]


def as_torch_takes(kind, start):
    return tuple(start) if kind == "lstm" else start[0]


def flat(result):
    output, last = result
    return [output, *(last if isinstance(last, tuple) else [last])]


CASES = [
    (kind, layers, both, batch_first, bias, projected)
    for kind, layers, both, batch_first, bias, projected in itertools.product(
        KINDS, (1, 2), (False, True), (False, True), (False, True), (False, True)
    )
    if not projected or kind == "lstm"
]


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_other_samples_or_layers_are_refused(kind, batch_first, stepwise):
    """torch's kernels write beyond such states."""
    _, twin, weights, biases = pair(kind, layers=2, batch_first=batch_first, stepwise=stepwise)
    x = torch.randn((N, T, I) if batch_first else (T, N, I))
    for index, count in itertools.product(range(2 if kind == "lstm" else 1), (1, N - 1, N + 1)):
        given = states(kind, 2, False, False)
        given[index] = given[index].new_zeros(2, count, H)
        with pytest.raises(RuntimeError, match=rf"a state of shape \[2, {count}, 6\] .* needs 3 along axis 1"):
            twin(x, given, weights, biases)
    with pytest.raises(RuntimeError, match=r"a state of shape \[1, 3, 6\] .* needs 2 along axis 0"):
        twin(x, states(kind, 1, False, False), weights, biases)


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_and_cells_refuse_states_of_other_samples(kind, stepwise):
    _, twin, weights, biases = pair(kind, stepwise=stepwise)
    packed = pack_padded_sequence(torch.randn(T, N, I), torch.tensor([5, 4, 2]))
    cell = RecurrentCell(kind)
    if stepwise:
        cell.add_module("awake", Awake())
    for count in (1, N - 1, N + 1):
        given = [each.new_zeros(1, count, H) for each in states(kind, 1, False, False)]
        with pytest.raises(RuntimeError):
            twin(packed.data, given, weights, biases, packed.batch_sizes)
        with pytest.raises(RuntimeError, match=rf"a state of shape \[{count}, 6\] .* needs 3 along axis 0"):
            cell(torch.randn(N, I), [each[0] for each in given], weights, biases)


@pytest.mark.sample(15)
@pytest.mark.parametrize(("kind", "layers", "both", "batch_first", "bias", "projected"), CASES)
def test_equals_torch_with_gradients(kind, layers, both, batch_first, bias, projected):
    net, twin, weights, biases = pair(
        kind, layers=layers, both=both, batch_first=batch_first, bias=bias, projected=projected
    )
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        net.to(dtype)
        x = torch.randn((N, T, I) if batch_first else (T, N, I), dtype=dtype, requires_grad=True)
        start = [state.requires_grad_() for state in states(kind, layers, both, projected, dtype)]
        expected, found = flat(net(x, as_torch_takes(kind, start))), twin(x, start, weights, biases)
        for a, b in zip(expected, found, strict=True):
            assert a.shape == b.shape
            assert float((a - b).detach().abs().max()) < tolerance
        inputs = [x, *start, *net.parameters()]
        gradients = [
            torch.autograd.grad(sum((t * torch.linspace(-1, 1, t.numel(), dtype=dtype).view_as(t)).sum() for t in outs),
                                inputs)
            for outs in (expected, found)
        ]
        for a, b in zip(*gradients, strict=True):
            assert float((a - b).abs().max()) < tolerance * max(1.0, float(a.abs().max())) * 4


@pytest.mark.parametrize(("kind", "layers", "both"), list(itertools.product(KINDS, (1, 2), (False, True))))
def test_packed_sequences_equal_torch(kind, layers, both):
    net, twin, weights, biases = pair(kind, layers=layers, both=both)
    x = torch.randn(T, N, I)
    packed = pack_padded_sequence(x, torch.tensor([5, 4, 2]))
    start = states(kind, layers, both, False)
    expected = net(packed, as_torch_takes(kind, start))
    found = twin(packed.data, start, weights, biases, packed.batch_sizes)
    for a, b in zip(flat((expected[0].data, expected[1])), found, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_fused_path_is_torch_bit_for_bit(kind, packed):
    net, twin, weights, biases = pair(kind, layers=2, both=True, stepwise=False)
    x, start = torch.randn(T, N, I), states(kind, 2, True, False)
    if packed:
        sequence = pack_padded_sequence(x, torch.tensor([5, 4, 2]))
        result = net(sequence, as_torch_takes(kind, start))
        expected = flat((result[0].data, result[1]))
        found = twin(sequence.data, start, weights, biases, sequence.batch_sizes)
    else:
        expected, found = flat(net(x, as_torch_takes(kind, start))), twin(x, start, weights, biases)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("stepwise", [False, True])
def test_cells_equal_torch(kind, bias, stepwise):
    torch.manual_seed(0)
    net = CELLS[kind](I, H, bias=bias, **nonlinearity(kind))
    twin = RecurrentCell(kind, has_biases=bias)
    if stepwise:
        twin.add_module("awake", Awake())
    x, start = torch.randn(N, I), [state[0] for state in states(kind, 1, False, False)]
    expected = net(x, as_torch_takes(kind, start))
    expected = expected if kind == "lstm" else (expected,)
    found = twin(x, start, [net.weight_ih, net.weight_hh], [net.bias_ih, net.bias_hh] if bias else [])
    for a, b in zip(expected, found, strict=True):
        assert float((a - b).abs().max()) <= (1e-6 if stepwise else 0.0)


def test_dropout_falls_between_layers_in_train_mode_only():
    net, twin, weights, biases = pair("gru", layers=2, dropout=0.5)
    x, start = torch.randn(T, N, I), states("gru", 2, False, False)
    assert torch.allclose(twin.eval()(x, start, weights, biases)[0], net.eval()(x, start[0])[0], atol=1e-6)
    twin.train()
    first, second = (twin(x, start, weights, biases) for _ in range(2))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1][0], second[1][0])  # the state of the first layer, before any dropout


@pytest.mark.parametrize("kind", KINDS)
def test_parts_can_be_called_as_they_say(kind):
    _, twin, weights, biases = pair(kind, layers=2, both=True)
    start = states(kind, 2, True, False)
    parts = twin.parts(torch.randn(T, N, I), start, weights, biases)
    assert list(parts) == [f"{step}.{part}" for step in ("l0", "l0_reverse", "l1", "l1_reverse")
                           for part in ("projection", "cell")]
    for path, (module, arguments) in parts.items():
        assert twin.get_submodule(path) is module
        result = module(*arguments)
        assert path.endswith("projection") or result[0].shape == (N, H)


def test_one_time_step_and_an_empty_batch():
    net, twin, weights, biases = pair("lstm")
    for shape in ((1, N, I), (T, 0, I)):
        x = torch.randn(shape)
        start = [torch.zeros(1, shape[1], H) for _ in range(2)]
        assert torch.allclose(twin(x, start, weights, biases)[0], net(x)[0], atol=1e-6)
