"""What each op does with factors: the channels that are free, and the channels that are pinned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.transforms.scaling import Scaled, difference
from tests.transforms.scaling_nets import Attention, SpelledGelu, batch, linear, net, norm
from tests.transforms.symmetries import count_symmetries

# Small nets: inputs, what must be free and what must be pinned, and how many symmetries there are beyond those found.

Case = tuple[Callable[[], nn.Module], tuple[Tensor, ...], set[str], set[str], int]


def _normed(m: Any, x: Tensor) -> Tensor:
    y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 0.1).sqrt()
    out: Tensor = m.b(y * m.weight + m.bias)
    return out


CASES: dict[str, Case] = {
    "relu": (lambda: net(lambda m, x: m.b(F.relu(m.a(x))), a=linear(3, 4), b=linear(4, 2)),
             (batch(3),), {"b"}, {"a"}, 0),
    "gelu pins": (lambda: net(lambda m, x: m.b(F.gelu(m.a(x))), a=linear(3, 4), b=linear(4, 2)),
                  (batch(3),), set(), {"a", "b"}, 0),
    "silu pins": (lambda: net(lambda m, x: m.b(F.silu(m.a(x))), a=linear(3, 4), b=linear(4, 2)),
                  (batch(3),), set(), {"a", "b"}, 0),
    "linear chain": (lambda: net(lambda m, x: m.c(m.b(m.a(x))), a=linear(3, 4), b=linear(4, 2), c=linear(2, 3)),
                     (batch(3),), {"b", "c"}, {"a"}, 0),
    "leaky, abs, neg, times a number": (
        lambda: net(lambda m, x: m.b(-F.leaky_relu(m.a(x), 0.1).abs() * 3 / 7), a=linear(3, 4), b=linear(4, 2)),
        (batch(3),), {"b"}, {"a"}, 0),
    "a number is added": (lambda: net(lambda m, x: m.b(F.relu(m.a(x) + 0.5)), a=linear(3, 4), b=linear(4, 2)),
                          (batch(3),), set(), {"a", "b"}, 0),
    "prelu": (lambda: net(lambda m, x: m.b(m.act(m.a(x))), a=linear(3, 4), b=linear(4, 2), act=nn.PReLU(4)),
              (batch(3),), {"b"}, {"a"}, 0),
    "clamped from below is relu": (
        lambda: net(lambda m, x: m.b(m.a(x).clamp(min=0)), a=linear(3, 4), b=linear(4, 2)), (batch(3),), {"b"}, {"a"},
        0),
    "maximum with zeros": (
        lambda: net(lambda m, x: m.b(torch.maximum(m.a(x), torch.zeros(4, dtype=x.dtype))), a=linear(3, 4),
                    b=linear(4, 2)), (batch(3),), {"b"}, {"a"}, 0),
    "glu: one operand carries, the other could too": (
        lambda: net(lambda m, x: m.out(F.relu(m.lin1(x) * m.lin2(x) + m.lin3(x))), lin1=linear(3, 4),
                    lin2=linear(3, 4), lin3=linear(3, 4), out=linear(4, 2)),
        (batch(3),), {"out"}, {"lin1", "lin2", "lin3"}, 4),
    "swiglu: the free operand carries": (
        lambda: net(lambda m, x: m.out(F.silu(m.gate(x)) * m.up(x)), gate=linear(3, 4), up=linear(3, 4),
                    out=linear(4, 2)), (batch(3),), {"out"}, {"gate", "up"}, 0),
    "the gate on the right": (
        lambda: net(lambda m, x: m.out(m.up(x) * m.gate(x).sigmoid()), gate=linear(3, 4), up=linear(3, 4),
                    out=linear(4, 2)), (batch(3),), {"out"}, {"gate", "up"}, 0),
    "a value times itself": (
        lambda: net(lambda m, x: m.out((y := m.a(x)) * y), a=linear(3, 4), out=linear(4, 2)), (batch(3),), set(),
        {"out"}, 4),
    "a value times a function of itself": (
        lambda: net(lambda m, x: m.out((y := m.a(x)) * y.sigmoid()), a=linear(3, 4), out=linear(4, 2)), (batch(3),),
        set(), {"out"}, 0),
    "a value divided by another": (
        lambda: net(lambda m, x: m.out(m.a(x) / (2 + m.b(x).sigmoid())), a=linear(3, 4), b=linear(3, 4),
                    out=linear(4, 2)), (batch(3),), {"out"}, {"a", "b"}, 0),
    "q, k and v share a norm": (
        lambda: net(lambda m, x: m.attn(m.norm(x)), norm=norm(4), attn=Attention()),
        (batch(3, 4),), {"attn.q", "attn.k", "attn.v", "attn.o"}, set(), 4),
    "v to o in matmuls": (
        lambda: net(lambda m, x: m.attn(x), attn=Attention(spelled=True)),
        (batch(3, 4),), {"attn.o"}, {"attn.q", "attn.k", "attn.v"}, 4),
    "grouped-query heads": (
        lambda: net(lambda m, x: m.attn(x), attn=Attention(heads=4, kv_heads=2)),
        (batch(3, 4),), {"attn.o"}, {"attn.q", "attn.k", "attn.v"}, 4),
    "a norm read by a layer and by the residual stream": (
        lambda: net(lambda m, x: m.out(F.relu((y := m.norm(x)) + m.a(y))), norm=norm(4), a=linear(4, 4),
                    out=linear(4, 2)), (batch(4),), {"a", "out"}, set(), 0),
    "a norm read by a layer and by an output": (
        lambda: net(lambda m, x: (y := m.norm(x)) + m.a(y), norm=norm(4), a=linear(4, 4)), (batch(4),), set(), {"a"},
        0),
    "rms norm": (lambda: net(lambda m, x: m.a(m.norm(x)), norm=nn.RMSNorm(4, eps=0.1), a=linear(4, 3)),
                 (batch(4),), {"a"}, set(), 0),
    "a norm in small ops": (
        lambda: net(_normed, weight=nn.Parameter(torch.ones(4)), bias=nn.Parameter(torch.ones(4)), b=linear(4, 3)),
        (batch(4),), {"b"}, set(), 0),
    "concat with channel offsets": (
        lambda: net(lambda m, x: m.out(torch.cat([F.relu(m.a(x)), m.b(x).abs(), x], 1)), a=linear(3, 2),
                    b=linear(3, 4), out=linear(9, 2)), (batch(3),), set(), {"a", "b"}, 0),
    "chunks with different readers": (
        lambda: net(lambda m, x: m.b((y := m.a(x).chunk(2, -1))[0].relu()) + m.c(y[1].abs()), a=linear(3, 6),
                    b=linear(3, 2), c=linear(3, 2)), (batch(3),), {"b", "c"}, {"a"}, 0),
    "two calls of one consumer": (
        lambda: net(lambda m, x: m.c(m.a(x).relu()) + m.c(m.b(x).abs()), a=linear(3, 4), b=linear(3, 4),
                    c=linear(4, 2)), (batch(3),), {"c"}, {"a", "b"}, 0),
    "two calls of one producer": (
        lambda: net(lambda m, x: m.b(m.a(x).relu()) + m.c(m.a(-x).abs()), a=linear(3, 4), b=linear(4, 2),
                    c=linear(4, 2)), (batch(3),), {"b", "c"}, {"a"}, 0),
    "a weight that is also its transpose": (
        lambda: net(lambda m, x: F.relu(m.a(x)) @ m.a.weight, a=linear(3, 4)), (batch(3),), set(), {"a"}, 0),
    "a weight whose row is added too": (
        lambda: net(lambda m, x: m.b(F.relu(m.a(x)) + m.b.weight[0]), a=linear(3, 4), b=linear(4, 2)), (batch(3),),
        set(), {"a", "b"}, 0),
    "a transposed weight": (
        lambda: net(lambda m, x: F.relu(m.a(x)) @ m.weight.t(), a=linear(3, 4), weight=nn.Parameter(torch.ones(2, 4))),
        (batch(3),), {"weight"}, {"a"}, 0),
    "halves of a packed weight": (
        lambda: net(lambda m, x: m.out(F.relu(F.linear(x, m.weight[:4], m.bias[:4])))
                    + m.out2(F.linear(x, m.weight[4:], m.bias[4:]).abs()),
                    weight=nn.Parameter(torch.ones(7, 3)), bias=nn.Parameter(torch.ones(7)), out=linear(4, 2),
                    out2=linear(3, 2)), (batch(3),), {"out", "out2"}, {"weight"}, 0),
    "a computed weight": (
        lambda: net(lambda m, x: F.linear(F.relu(m.a(x)), m.weight.tanh()), a=linear(3, 4),
                    weight=nn.Parameter(torch.ones(2, 4))), (batch(3),), set(), {"a"}, 0),
    "the left factor": (
        lambda: net(lambda m, x: m.weight @ F.relu(m.a(x)).mT, a=linear(3, 4), weight=nn.Parameter(torch.ones(2, 4))),
        (batch(5, 3),), {"weight"}, {"a"}, 0),
    "addmm": (
        lambda: net(lambda m, x: torch.addmm(m.bias, F.relu(m.a(x)), m.weight).relu() @ m.last, a=linear(3, 4),
                    weight=nn.Parameter(torch.ones(4, 2)), bias=nn.Parameter(torch.ones(2)),
                    last=nn.Parameter(torch.ones(2, 2))), (batch(3),), {"weight", "last"}, {"a"}, 0),
    "layer scale absorbs": (
        lambda: net(lambda m, x: m.c(F.relu(m.b(F.gelu(m.a(x))) * m.gamma + m.a(x))), a=linear(3, 4), b=linear(4, 4),
                    c=linear(4, 2), gamma=nn.Parameter(torch.ones(4))), (batch(3),), set(), {"b", "c"}, 0),
    "layer scale absorbs on both sides": (
        lambda: net(lambda m, x: m.c(F.relu(m.b(x) * m.gamma)), b=linear(3, 4), c=linear(4, 2),
                    gamma=nn.Parameter(torch.ones(4))), (batch(3),), {"c"}, {"b"}, 0),
    "a learned scalar is left": (
        lambda: net(lambda m, x: m.c(F.relu(m.b(x) * m.scale)), b=linear(3, 4), c=linear(4, 2),
                    scale=nn.Parameter(torch.ones(1))), (batch(3),), {"c"}, {"b"}, 1),
    "position embedding": (
        lambda: net(lambda m, x: m.c(F.relu(m.b(x) + m.pos)), b=linear(3, 4), c=linear(4, 2),
                    pos=nn.Parameter(torch.ones(1, 5, 4))), (batch(5, 3),), {"c"}, {"b"}, 0),
    "class token": (
        lambda: net(lambda m, x: m.c(F.relu(torch.cat([m.token.expand(x.shape[0], -1, -1), m.b(x)], 1))),
                    b=linear(3, 4), c=linear(4, 2), token=nn.Parameter(torch.ones(1, 1, 4))), (batch(5, 3),), {"c"},
        {"b"}, 0),
    "embedding": (
        lambda: net(lambda m, ids: m.b(m.table(ids)), table=nn.Embedding(5, 4), b=linear(4, 3)),
        (torch.arange(40).view(20, 2) % 5,), {"b"}, set(), 0),
    "embedding tied to the head: r in one place would be 1/r in the other": (
        lambda: net(lambda m, ids: m.b(m.table(ids)).relu() @ m.table.weight.t(), table=nn.Embedding(20, 2),
                    b=linear(2, 2)), (torch.arange(20)[None],), set(), {"b", "table"}, 2),
    "tokens picked by what the data says": (
        lambda: net(lambda m, x: m.c(F.relu(m.b(x) + m.pos)[torch.arange(len(x)), x[:, :, 0].argmax(1)]),
                    b=linear(3, 4), c=linear(4, 2), pos=nn.Parameter(torch.ones(3, 4))), (batch(3, 3),), {"c"}, {"b"},
        0),
    "channels picked by what the data says": (
        lambda: net(lambda m, x: m.c(F.relu(m.b(x)).gather(1, x.argsort(1))), b=linear(3, 3), c=linear(3, 2)),
        (batch(3),), {"c"}, {"b"}, 0),
    "channels picked by a fixed index": (
        lambda: net(lambda m, x: m.c(F.relu(m.b(x))[:, torch.tensor([2, 0, 1, 0])]), b=linear(3, 3), c=linear(4, 2)),
        (batch(3),), {"c"}, {"b"}, 0),
    "conv": (
        lambda: net(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Conv2d(2, 3, 3, padding=1), b=nn.Conv2d(3, 2, 2)),
        (batch(2, 4, 4),), {"b"}, {"a"}, 0),
    "depthwise": (
        lambda: net(lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))), a=nn.Conv2d(2, 3, 1), b=nn.Conv2d(3, 3, 2, groups=3),
                    c=nn.Conv2d(3, 2, 1)), (batch(2, 4, 4),), {"b", "c"}, {"a"}, 0),
    "grouped": (
        lambda: net(lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))), a=nn.Conv1d(2, 4, 1),
                    b=nn.Conv1d(4, 6, 2, groups=2), c=nn.Conv1d(6, 2, 1)), (batch(2, 6),), {"b", "c"}, {"a"}, 0),
    "transposed and grouped": (
        lambda: net(lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))), a=nn.Conv1d(2, 4, 1),
                    b=nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), c=nn.Conv1d(6, 2, 1)),
        (batch(2, 6),), {"b", "c"}, {"a"}, 0),
    "pools, paddings and interpolation": (
        lambda: net(lambda m, x: m.c(F.pad(F.interpolate(F.avg_pool2d(F.max_pool2d(F.relu(m.a(x)), 2, 1, 1), 2), None,
                                                         2.0, "bilinear"), (1, 0, 1, 0)).mean((2, 3))),
                    a=nn.Conv2d(2, 3, 2), c=linear(3, 2)), (batch(2, 6, 6),), {"c"}, {"a"}, 0),
    "padding with another number": (
        lambda: net(lambda m, x: m.c(F.pad(F.relu(m.a(x)), (1, 0, 1, 0), value=0.5)), a=nn.Conv2d(2, 3, 2),
                    c=nn.Conv2d(3, 2, 2)), (batch(2, 4, 4),), set(), {"a", "c"}, 0),
    "flattened images": (
        lambda: net(lambda m, x: m.c(F.relu(m.a(x)).flatten(1)), a=nn.Conv2d(2, 3, 2), c=linear(12, 2)),
        (batch(2, 3, 3),), {"c"}, {"a"}, 0),
    "an input is pinned, an output too": (
        lambda: net(lambda m, x: (m.b(y := F.relu(m.a(x))), y), a=linear(3, 4), b=linear(4, 2)), (batch(3),), set(),
        {"a", "b"}, 0),
    "a comparison, which has no derivative": (
        lambda: net(lambda m, x: m.b(torch.where((y := F.relu(m.a(x))) > 0.3, y, 0.0)), a=linear(3, 4),
                    b=linear(4, 2)), (batch(3),), set(), {"a", "b"}, 4),
    "masked with 0": (
        lambda: net(lambda m, x: m.b(F.relu(m.a(x)).masked_fill(x[:, :1] > 0, 0.0)), a=linear(3, 4), b=linear(4, 2)),
        (batch(3),), {"b"}, {"a"}, 0),
    "masked with another number": (
        lambda: net(lambda m, x: m.b(F.relu(m.a(x)).masked_fill(x[:, :1] > 0, 2.0)), a=linear(3, 4), b=linear(4, 2)),
        (batch(3),), set(), {"a", "b"}, 0),
}


@pytest.mark.sample(3)
@pytest.mark.medium
@pytest.mark.parametrize("name", CASES)
def test_what_is_free_is_what_must_be(name: str) -> None:
    build, inputs, free, pinned, beyond = CASES[name]
    model = build()
    scaled = Scaled(model, inputs)

    def of(names: set[str]) -> set[str]:
        return {name if name in dict(model.named_parameters()) else f"{name}.weight" for name in names}

    assert scaled.free_weights() >= of(free)
    assert scaled.pinned_weights() >= of(pinned)
    assert scaled.error(scaled.scaled(scaled.random_factors())) <= 1e-10
    assert count_symmetries(model, inputs) == int(scaled.scales.free.sum()) + beyond


@pytest.mark.medium
def test_the_constant_of_a_spelled_out_gelu_stays() -> None:
    half = torch.tensor(0.5)

    def model() -> nn.Module:
        return net(
            lambda m, x: m.b(m.act(m.a(m.norm(x)))) + m.d(m.act2(m.c(m.norm2(x)))), norm=norm(4), a=linear(4, 6),
            b=linear(6, 4), act=SpelledGelu(half), norm2=norm(4), c=linear(4, 6), d=linear(6, 4),
            act2=SpelledGelu(half),
        ).double().eval()

    x = batch(4)
    decomposed = torch.export.export(model(), (x,)).run_decompositions().module()
    for scaled in (Scaled(model(), x), Scaled(decomposed_net(decomposed), x)):
        assert scaled.free_weights() == {"a.weight", "c.weight"}
        assert scaled.pinned_weights() == {"b.weight", "d.weight"}
        changed = scaled.scaled(scaled.random_factors())
        assert scaled.error(changed) <= 1e-10
        for before, after in zip(scaled.model.buffers(), changed.buffers(), strict=True):
            assert torch.equal(before, after)


def decomposed_net(program: nn.Module) -> nn.Module:
    """An exported program as a module that can be put in eval mode."""
    program.eval = lambda: program  # type: ignore[method-assign]
    return program


def test_clamps_hand_factors_on_if_their_bounds_do() -> None:
    model = net(lambda m, x: m.b(F.relu6(m.a(x))), a=nn.Conv2d(2, 3, 1), b=nn.Conv2d(3, 2, 1))
    scaled = Scaled(model, batch(2, 4, 4) * 10)
    (clamp,) = scaled.scales.clamps
    assert (clamp.channel_axis, clamp.lower, clamp.upper) == (1, 0.0, 6.0)
    assert torch.equal(clamp.variables, scaled.writes("a.weight"))
    assert bool((scaled.scales.clamped & scaled.scales.free)[clamp.variables].all())
    changed = scaled.scaled(scaled.random_factors(clamped=True))
    assert scaled.error(changed) > 1e-3  # the bound is still 6
    (upper,) = (scaled.random_factors(clamped=True)[clamp.variables] * 6,)
    a, b = (changed.get_submodule(name) for name in "ab")
    x = F.conv2d(scaled.args[0], a.weight, a.bias)
    y = F.conv2d(torch.minimum(x.relu(), upper.view(1, -1, 1, 1)), b.weight, b.bias)
    assert float((y - scaled.model(*scaled.args)).abs().max()) < 1e-10


def test_what_the_data_picks_may_be_picked_elsewhere_next_time() -> None:
    model = net(lambda m, x: m.c(F.relu(m.b(x)).gather(1, x.argsort(1))), b=linear(3, 3), c=linear(3, 2))
    scaled = Scaled(model, batch(3).sort(1).values)  # here the op moves nothing
    changed = scaled.scaled(scaled.random_factors())
    assert scaled.free_weights() == {"c.weight"}
    assert difference(scaled.model, changed, (batch(3),), {}) <= 1e-10
