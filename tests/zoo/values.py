"""Models of the zoo about single ops: data movement, in-place writes, integers and masks, scalars."""

import torch
import torch.nn.functional as F
from torch import nn


class Splits(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.a, self.b = nn.Linear(8, 12), nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x):
        first, second, third = self.fc(x).chunk(3, dim=-1)
        left, right = second.split([3, 1], dim=-1)
        return self.a(first) + self.b(left) * right + third


class InPlace(nn.Module):
    """relu_, add_, slice assignment, fill_, a view written through."""

    def __init__(self):
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.conv(x)).clone()
        y[:, 0] = 1.0
        y[:, 1:3] *= 2
        y[:, 3].add_(x[:, 0])
        flat = y.view(y.shape[0], -1)
        flat[:, ::7] = flat[:, ::7].sigmoid()
        return y.clamp_(min=-0.5)


class SidePath(nn.Module):
    """Integers and booleans beside the numbers: argmax, comparison, where, gather."""

    def __init__(self):
        super().__init__()
        self.fc, self.table = nn.Linear(8, 6), nn.Embedding(6, 8)

    def forward(self, x):
        scores = self.fc(x)
        best = scores.argmax(-1)
        large = (scores > 0) & (torch.arange(6, device=x.device) < 4)
        y = torch.where(large, scores, torch.zeros_like(scores)) + scores.gather(1, best[:, None])
        return self.table(best).sum(-1, keepdim=True) * y, best


class StacksAndScatters(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)
        self.register_buffer("index", torch.tensor([2, 0, 1, 3]))

    def forward(self, x):
        a, b = self.a(x), torch.tanh(self.b(x))
        both = torch.stack([a, b], dim=1).flatten(1)
        moved = torch.zeros_like(a).scatter(1, self.index.expand_as(a), b)
        return both, torch.where(a > b, moved, b), torch.index_select(a, 1, self.index)


class ScalarArithmetic(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        y = 2 * self.fc(x) - 1
        return (1 - y / 3) ** 2 + self.scale * y.abs().sqrt() + y.detach() // 2


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = F.dropout(torch.relu(self.fc1(x)), 0.5, training=self.training)
        x = F.alpha_dropout(x, 0.2, training=self.training)
        return self.fc2(F.dropout1d(x[:, :, None], 0.3, training=self.training).squeeze(2))


class Gated(nn.Module):
    """GLU, and SwiGLU with RMSNorm."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8), nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x):
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return F.glu(self.up(x), -1) + self.down(F.silu(gate) * value)


class Creations(nn.Module):
    """Tensors made in the forward: they must follow the model to its device and dtype."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        weight = self.fc.weight
        here = {"device": weight.device, "dtype": weight.dtype}
        y = self.fc(x) + torch.arange(8, **here) + torch.eye(8, **here)[0] + torch.full((8,), 0.5, **here)
        return torch.cat([y, torch.zeros(x.shape[0], 2, **here), x.new_ones(x.shape[0], 1)], 1)


class NoGrad(nn.Module):
    """A region without gradients, as rotary embeddings have."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            angle = self.fc(x).sin()
        return self.fc(x) * angle


class StochasticDepth(nn.Module):
    """Branches on ``training``: its train mode is not in the graph."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc1(x)
        if self.training:
            y = y * 2
        return x + self.fc2(y)


class FixedBatch(nn.Module):
    """Reshapes with the batch size written into the code."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x).reshape(4, 8).view(2, 2, 8).sum(1)
