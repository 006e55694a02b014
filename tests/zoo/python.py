"""Small models that cannot be one graph: values decide what Python does next, so only parts of them are captured.

>>> PYTHON["experts"].run(PYTHON["experts"].model()).shape
torch.Size([2, 12, 8])
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.entry import Entry, Inputs, images, sequences, tokens, vectors


def sign(x: Tensor) -> float:
    """A number that only a run knows."""
    return 1.0 if float(x.detach().sum()) > 0 else -1.0


def block(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inner, outer), nn.ReLU())


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.plus, self.minus = block(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        if x.sum() > -99:
            return self.plus(self.body(x))
        return self.minus(self.body(x))


class ListLoop(nn.Module):
    """Takes a list of any length, of images of any size."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, pictures):
        rows = []
        for index in range(len(pictures)):
            features = torch.relu(self.conv(pictures[index])).mean((2, 3))
            rows.append(features * sign(pictures[index]))
        return self.head(torch.cat(rows))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, gate=None):
        y = self.fc(x)
        return y if gate is None else y * gate


class Kinds(nn.Module):
    """Calls its parts with three axes and with two, with a gate and without, as generation does."""

    def __init__(self):
        super().__init__()
        self.body, self.gated, self.head = block(8, 8), Gated(), nn.Linear(8, 4)

    def forward(self, x):
        y = self.gated(self.body(x)) * sign(x)
        last = self.body(y[:, -1])
        return self.head(self.gated(last, torch.sigmoid(last)))


class Masked(nn.Module):
    """Works on as many rows as hold something positive, and returns them."""

    def __init__(self):
        super().__init__()
        self.inner, self.score, self.outer = block(8, 8), nn.Linear(8, 1), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.inner(x.flatten(0, 1))
        kept = hidden[self.score(hidden)[:, 0] > 0]
        assert len(kept) > 0
        rows = x.sum((1, 2)).nonzero().flatten().tolist()
        return self.outer(kept), len(rows)


class Experts(nn.Module):
    """Every token goes through the expert its router chooses; some experts get none, or one."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)])

    def forward(self, x):
        flat = x.flatten(0, 1) * sign(x)
        gate, choice = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            (rows,) = (choice == index).nonzero(as_tuple=True)
            out.index_add_(0, rows, expert(flat[rows]) * gate[rows, None])
        return out.view_as(x)


class Detector(nn.Module):
    """Boxes and scores from a backbone, then a loop that keeps the best of those that overlap, picture by picture."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.boxes, self.scores = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 1, 1)

    def forward(self, x):
        features = self.backbone(x)
        boxes = self.boxes(features).flatten(2).transpose(1, 2)
        scores = self.scores(features).flatten(1).sigmoid()
        return [self._best(each, score) for each, score in zip(boxes, scores, strict=True)]

    def _best(self, boxes: Tensor, scores: Tensor) -> dict[str, Tensor]:
        order, kept = scores.argsort(descending=True).tolist(), []
        while order:
            best = order.pop(0)
            kept.append(best)
            order = [i for i in order if float((boxes[i] - boxes[best]).abs().max()) > 0.5]
        return {"boxes": boxes[kept], "scores": scores[kept], "count": torch.tensor(len(kept))}


class ManySizes(nn.Module):
    """One head on several sizes, from several places; ``also`` is its second name."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU())
        self.also = self.head

    def forward(self, x):
        x = self.stem(x) * sign(x)
        levels = [self.head(x), self.head(F.avg_pool2d(x, 2)), self.also(F.avg_pool2d(x, 4))]
        return torch.cat([level.flatten(2) for level in levels], 2)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, mask=None, *, scale=1.0):
        y = self.fc(x) * scale + torch.arange(8, dtype=x.dtype, device=x.device)
        return y if mask is None else y * mask


class Keywords(nn.Module):
    """A child called by keywords, in another order than it declares them; it makes a tensor of its own."""

    def __init__(self):
        super().__init__()
        self.scaled, self.head = Scaled(), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.scaled(scale=0.5, mask=(x > 0).to(x.dtype), x=x)
        return self.head(hidden * sign(x))


@dataclass
class Pieces:
    left: Tensor
    right: Tensor


class Splitter(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        return OrderedDict(left=self.left(x), more={"right": self.right(x)})


class Gather(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, levels):
        return Pieces(torch.relu(self.fc(torch.cat([levels["left"], levels["more"]["right"]], 1))), levels["left"])


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 4)

    def forward(self, pieces):
        return self.fc(torch.cat([pieces.left, pieces.right], 1))


class Containers(nn.Module):
    """Dicts, an ordered dict and a dataclass that torch does not know pass between its children."""

    def __init__(self):
        super().__init__()
        self.splitter, self.gather, self.join = Splitter(), Gather(), Join()

    def forward(self, x):
        levels = self.splitter(x)
        levels["left"] = levels["left"] * sign(x)
        return self.join(self.gather(levels))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.embedding(x))


class TiedIslands(nn.Module):
    """The embedding inside one child is the weight of another."""

    def __init__(self):
        super().__init__()
        self.encoder, self.body, self.head = Encoder(), block(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.encoder.embedding.weight

    def forward(self, x):
        hidden = self.encoder(x)
        return self.head(self.body(hidden) * sign(hidden))


class Iterated(nn.Module):
    """Layers in a list and in a dict, walked through in Python, left early by data."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([block(8, 8) for _ in range(3)])
        self.heads = nn.ModuleDict({"mean": nn.Linear(8, 4), "spread": nn.Linear(8, 4)})

    def forward(self, x):
        for each in self.blocks:
            x = x + each(x)
            if float(x.detach().abs().max()) > 1e6:
                break
        return {name: head(x) for name, head in self.heads.items()}


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)

    def encode(self, x):
        return torch.tanh(self.down(x))

    def decode(self, x):
        return self.up(x)

    def forward(self, x):
        return self.decode(self.encode(x))


class OtherMethods(nn.Module):
    """Never calls its child, only methods of it."""

    def __init__(self):
        super().__init__()
        self.codec, self.head = Codec(), nn.Linear(8, 4)

    def forward(self, x):
        code = self.codec.encode(x)
        return self.head(self.codec.decode(code * sign(code)))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out_channels = nn.Conv2d(3, 8, 3), 8

    def forward(self, x):
        return torch.relu(self.conv(x))


class ReadsAttributes(nn.Module):
    """Asks its children for attributes, parameters and their number."""

    def __init__(self):
        super().__init__()
        self.backbone, self.fc = Backbone(), nn.Linear(8, 8)
        self.blocks = nn.Sequential(block(8, 8), block(8, 8))

    def forward(self, x):
        x = self.backbone(x).mean((2, 3)).view(-1, self.backbone.out_channels)
        x = self.fc(x * sign(x)) + F.linear(x, self.fc.weight)
        return self.blocks(x) / len(self.blocks) + self.fc.out_features


class Constant(nn.Module):
    """Its output depends on parameters alone."""

    def __init__(self):
        super().__init__()
        self.fc, self.seed = nn.Linear(8, 8), nn.Parameter(torch.randn(1, 8))

    def forward(self):
        return torch.relu(self.fc(self.seed))


class NoInput(nn.Module):
    """A child that no input reaches, and one that is never called."""

    def __init__(self):
        super().__init__()
        self.prompt, self.fc, self.never = Constant(), nn.Linear(8, 4), nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x * sign(x) + self.prompt())


class Parcel:
    """Nothing that torch could look into."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Packer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = block(8, 8)

    def forward(self, x):
        return Parcel(self.body(x))


class Unpacker(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, parcel):
        return self.head(self.norm(parcel.x))


class Parcels(nn.Module):
    """Its children hand on an object that no graph can take, so only what is inside them can be captured."""

    def __init__(self):
        super().__init__()
        self.packer, self.unpacker = Packer(), Unpacker()

    def forward(self, x):
        return self.unpacker(self.packer(x * sign(x)))


class Deepest(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.scale = block(8, 8), nn.BatchNorm1d(8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.norm(self.body(x)) * sign(x) * self.scale


class Deeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = Deepest(), Deepest(), nn.Dropout(0.5)

    def forward(self, x):
        return self.second(self.drop(self.first(x))) * sign(x[:1])


class Deep(nn.Module):
    """Python in Python in Python."""

    def __init__(self):
        super().__init__()
        self.stages, self.head = nn.ModuleDict({"one": Deeper()}), nn.Linear(8, 4)

    def forward(self, x):
        y = self.stages["one"](x)
        return self.head(y if float(y.detach().max()) < 1e6 else x)


@dataclass(frozen=True)
class PythonEntry(Entry):
    """A model and its ``islands``: the modules that must become graphs, in the order they are called.

    ``path@1`` is a second graph of one module, for calls of another kind. ``unreached`` are the modules that the inputs
    do not call.
    """

    islands: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the islands."""
        return tuple(path for path in self.islands if "@" not in path)


PYTHON: dict[str, PythonEntry] = {}


def _add(
    name: str, builder: Callable[[], nn.Module], inputs: Callable[[int], Inputs], islands: str, *unreached: str
) -> None:
    PYTHON[name] = PythonEntry(name, builder, inputs, islands=tuple(islands.split()), unreached=unreached)


def _pictures(batch: int) -> tuple[Any, ...]:
    return ([torch.randn(1, 3, 6 + index, 8) for index in range(batch)],)


def _keywords(batch: int) -> Mapping[str, Any]:
    return {"x": torch.randn(batch, 8)}


_add("branch", Branch, vectors(), "body plus", "minus")
_add("list_loop", ListLoop, _pictures, "conv head")
_add("kinds", Kinds, sequences(6, 8), "body body@1 gated gated@1 head")
_add("masked", Masked, sequences(6, 8), "inner score outer")
_add("experts", Experts, sequences(12, 8), "router experts.0 experts.1 experts.2")
_add("detector", Detector, images(), "backbone boxes scores")
_add("many_sizes", ManySizes, images(), "stem head")
_add("keywords", Keywords, _keywords, "scaled head")
_add("containers", Containers, vectors(), "splitter gather.fc join.fc")
_add("tied_islands", TiedIslands, tokens(), "encoder body head")
_add("iterated", Iterated, vectors(), "blocks.0 blocks.1 blocks.2 heads.mean heads.spread")
_add("other_methods", OtherMethods, vectors(), "codec.down codec.up head")
_add("reads_attributes", ReadsAttributes, images(), "backbone fc blocks.0 blocks.1")
_add("no_input", NoInput, vectors(), "prompt fc", "never")
_add("parcels", Parcels, vectors(), "packer.body unpacker.norm unpacker.head")
_add("deep", Deep, vectors(),
     "stages.one.first.body stages.one.first.norm stages.one.second.body stages.one.second.norm head")
