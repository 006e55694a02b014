import pytest
import torch
from torch import nn
from torch.nn import functional

import qtk
from qtk.graph.masks import maskable_sites


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("causal", torch.full((4, 4), -1e9).triu(1))
        self.run = forward

    def forward(self, x, mask):
        return self.run(self, x, mask)


@pytest.mark.medium
@pytest.mark.parametrize(("forward", "expected"), [
    (lambda m, x, mask: m.out((m.fc(x) + mask).softmax(-1)), {"fc:out", "add:out", "mask:input"}),
    (lambda m, x, mask: m.out(m.fc(x).masked_fill(mask > 0, -torch.inf).relu()), {"masked_fill:out"}),
    (lambda m, x, mask: m.out(torch.where(mask > 0, m.fc(x), -1e38)), {"where:out"}),
    (lambda m, x, mask: m.out((m.fc(x) + mask).amax(-1, keepdim=True) * x), {"fc:out", "add:out", "mask:input"}),
    (lambda m, x, mask: m.out(x) + (m.fc(x) + mask).argmax(-1), {"fc:out", "mask:input"}),
    (lambda m, x, mask: m.out(m.fc(x).relu() + mask), {"add:out"}),
    (lambda m, x, mask: m.out(m.fc(x) - 1e4 * (mask > 0).float()), {"sub:out"}),
    (lambda m, x, mask: m.out(torch.cat([m.fc(x) + (1 - (mask > 0).float()) * -1e4, x])), {"add:out", "concat:out"}),
    (lambda m, x, mask: m.out((m.fc(x) + mask[:, :1]) / 2), {"add:out", "div:out"}),
    (lambda m, x, mask: m.out(m.fc(x) - (1 - torch.ones(4, 4).tril()) * 1e9), {"sub:out"}),
    (lambda m, x, mask: m.out(m.fc(x) + m.causal), {"add:out"}),
    (lambda m, x, mask: m.out(m.fc(x) + m.fc.bias), set()),
    (lambda m, x, mask: m.out(m.fc(x).relu() + m.out(mask)), set()),
    (lambda m, x, mask: m.out(m.fc(mask) + mask), set()),
    (lambda m, x, mask: m.fc(functional.scaled_dot_product_attention(x, x, x, mask)), {"mask:input", "x:input"}),
])
def test_where_a_mask_can_be(forward, expected):
    prepared = qtk.prepare_model(Net(forward), (torch.randn(4, 4), torch.ones(4, 4)))
    found = {site.name for site in maskable_sites(prepared) if site.port and site.owner in ("", "fc", "out")}
    assert expected <= found
    assert not {"out:out"} & found
    if not expected:
        assert not {"fc:out", "add:out"} & found
