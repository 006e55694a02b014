"""One encoding for what an op reads in several graphs of a module."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk

pytestmark = pytest.mark.medium


class CausalConv(nn.Module):
    """A convolution over time that keeps the last two frames for the next call, and a gate of what it reads."""

    def __init__(self, gated):
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(6, 6), nn.Conv1d(6, 6, 3), nn.Linear(6, 4)
        self.gated = gated

    def forward(self, x, kept=None):
        frames = self.first(x).transpose(1, 2)
        with_kept = F.pad(frames, (2, 0)) if kept is None else torch.cat([kept, frames], 2)
        hidden = F.silu(self.conv(with_kept))
        if self.gated:
            hidden = hidden * torch.sigmoid(frames)
        return self.last(hidden.transpose(1, 2)), with_kept[:, :, -2:]


def simulated(gated, whole_first):
    torch.manual_seed(0)
    model = CausalConv(gated).eval()
    calls = [{"x": torch.randn(3, 9, 6)}, {"x": torch.randn(3, 9, 6), "kept": torch.randn(3, 6, 2)}]
    calls = calls if whole_first else calls[::-1]
    states = {} if whole_first else {"kept": 1}
    sim = qtk.QuantSim(model, calls[0], variants=calls[1:], dynamic_shapes="all", states=states)
    sim.compute_encodings(calls, progress=False)
    return sim


@pytest.mark.sample(2)
@torch.no_grad()
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("whole_first", [False, True])
def test_a_call_in_two_parts_computes_what_one_call_does(gated, whole_first):
    sim = simulated(gated, whole_first)
    x = torch.randn(4, 12, 6)
    whole, _ = sim.model(x=x)
    first, kept = sim.model(x=x[:, :7])
    second, _ = sim.model(x=x[:, 7:], kept=kept)
    step = sim.quantizers["last:out"].encoding.scale.item()
    difference = (torch.cat([first, second], 1) - whole).abs()
    assert (difference > 0.5 * step).float().mean() < 0.01  # other sums of a product may move a tie
    assert difference.max() < 1.5 * step


@pytest.mark.parametrize("whole_first", [False, True])
def test_the_edge_has_the_encoding_of_the_merge(whole_first):
    sim = simulated(False, whole_first)
    encodings = {site: sim.quantizers[site].encoding for site in ("conv:in[0]", "concat:out") if site in sim.quantizers}
    assert len({id(encoding) for encoding in encodings.values()}) == 1


def test_two_formats_stay_apart():
    torch.manual_seed(0)
    calls = [{"x": torch.randn(3, 9, 6)}, {"x": torch.randn(3, 9, 6), "kept": torch.randn(3, 6, 2)}]
    config = {"version": 1, "rules": [{"match": {"op": ["conv1d"]}, "input": {"dtype": "int16", "symmetric": True}}]}
    sim = qtk.QuantSim(CausalConv(False).eval(), calls[1], variants=calls[:1], dynamic_shapes="all", config=config)
    specs = {str(site): str(decided.spec) for site, decided in sim.plan.items()}
    assert "int16" in specs["conv:in[0]"]
    assert "int16" not in specs["concat:out"]


class Towers(nn.Module):
    """An image and a text through one projection, and a head that has the words of the embedding."""

    def __init__(self):
        super().__init__()
        self.proj, self.words = nn.Linear(6, 6), nn.Embedding(6, 6)

    def forward(self, image=None, text=None, code=None):
        if code is not None:
            return nn.functional.linear(code, self.words.weight)
        if image is None:
            return self.proj(text)
        return nn.functional.linear(torch.sigmoid(self.proj(image)), self.words.weight)


@pytest.mark.parametrize("other", ["text", "code"])
def test_what_no_call_left_for_another_keeps_a_range_of_its_own(other):
    torch.manual_seed(0)
    calls = [{"image": torch.randn(9, 6)}, {other: 50 * torch.randn(9, 6)}]
    sim = qtk.QuantSim(Towers().eval(), calls[0], variants=calls[1:])
    sim.compute_encodings(calls, progress=False)
    joined = {str(site): str(decided.leader) for site, decided in sim.plan.items() if decided.leader is not None}
    assert not {"image:input", f"{other}:input", "sigmoid:out"} & joined.keys(), joined


def test_a_layer_that_graphs_call_unequally_often_is_not_one_place():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(6, 6)

        def forward(self, text, kept=None):
            if kept is None:
                return self.proj(text)
            return self.proj(torch.cat([kept, kept])), self.proj(text)

    torch.manual_seed(0)
    calls = [{"text": torch.randn(9, 6), "kept": 50 * torch.randn(9, 6)}, {"text": torch.randn(9, 6)}]
    sim = qtk.QuantSim(Twice().eval(), calls[0], variants=calls[1:])
    assert all(decided.leader is None or ("concat" in str(site) + str(decided.leader) and "text" not in str(site))
               for site, decided in sim.plan.items())
