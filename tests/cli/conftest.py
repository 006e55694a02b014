"""A user's project: a module with a model and data that it separates, and a recipe beside it."""

import textwrap

import pytest
import torch
import yaml
from safetensors.torch import save_file

MODULE = """
import random
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.act, self.second = nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(self.act(self.first(x)))

def net():
    return Net()

def random_net():
    return nn.Linear(6, 4)

def dict_net():
    class DictNet(Net):
        def forward(self, x):
            hidden = self.act(self.first(x))
            return {"scores": self.second(hidden), "hidden": hidden}
    return DictNet()

def pairs(seed, count):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(16, 6, generator=generator)
        yield x, Net()(x).argmax(1)

def calibration():
    return list(pairs(0, 3))

def evaluation():
    yield from pairs(1, 2)

def shuffled():
    yield from pairs(random.randrange(10**6), 2)

def mean_confidence(pairs):
    return sum(float(output.detach().softmax(1).max(1).values.mean()) for output, _ in pairs) / len(pairs)

def text_measure(pairs):
    return "good"

def broken():
    raise KeyError("no such folder")

def endless():
    generator = torch.Generator().manual_seed(2)
    while True:
        x = torch.randn(2, 6, generator=generator)
        yield x, Net()(x).argmax(1)

def nothing():
    return iter(())

def bare():
    return [torch.zeros(2, 6)]

def triples():
    return [(torch.zeros(2, 6), torch.zeros(2), "extra")]

def nan(pairs):
    return float("nan")

def infinite(pairs):
    return float("inf")

def one(pairs):
    return 1.0

def class_net():
    class ClassNet(Net):
        def forward(self, x):
            return super().forward(x).argmax(-1)
    return ClassNet()

def partial_net():
    class PartialNet(Net):
        def forward(self, x):
            return None, super().forward(x)
    return PartialNet()

def bad_net():
    raise ValueError("no such weights")

def padded_net():
    class PaddedNet(nn.Module):
        def forward(self, x, mask):
            return torch.relu(x)
    return PaddedNet()

def padded():
    x = torch.full((2, 4, 3), 5.0)
    x[:, 3] = 1000.0
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[:, 3] = False
    return [((x, mask), torch.zeros(2, 4))]

def stops():
    yield torch.zeros(2, 6), torch.zeros(2)
    raise SystemExit(0)

def breaks():
    yield torch.zeros(2, 6), torch.zeros(2)
    raise OSError("disk")

class Unstarted(list):
    def __iter__(self):
        raise OSError("no worker")

def unstarted():
    return Unstarted([0])

def token_net():
    class TokenNet(Net):
        def forward(self, x):
            return super().forward(x).mean(1)
    torch.manual_seed(2)
    return TokenNet()

def sentences():
    generator = torch.Generator().manual_seed(3)
    for length in (5, 8, 3):
        yield torch.randn(4, length, 6, generator=generator), torch.zeros(4, dtype=torch.long)

def number():
    return 3

VALUE = 3
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the module ``project.module``; ``project.recipe(**changes)`` writes a recipe, returns its path."""

    class Project:
        folder = tmp_path / "project"
        module = f"user_{abs(hash(str(tmp_path))):x}"

        def content(self, **changes):
            content = {
                "models": [{"name": "net", "model": f"{self.module}:net"}],
                "data": {"calibration": f"{self.module}:calibration", "evaluation": f"{self.module}:evaluation"},
                "settings": [{"name": "w8a8", "weight_bits": 8, "activation_bits": 8}],
                "exports": ["encodings_json"],
                "output": str(tmp_path / "results"), "report": False,
            }
            return {key: value for key, value in (content | changes).items() if value is not None}

        def recipe(self, **changes):
            path = self.folder / "recipe.yaml"
            path.write_text(yaml.safe_dump(self.content(**changes)))
            return path

        def weights(self, **changes):
            generator = torch.Generator().manual_seed(5)
            shapes = {"first.weight": (16, 6), "first.bias": (16,), "second.weight": (4, 16), "second.bias": (4,)}
            state = {name: torch.randn(shape, generator=generator) for name, shape in (shapes | changes).items()}
            path = self.folder / "weights.safetensors"
            save_file(state, path)
            return path, state

    Project.folder.mkdir()
    (Project.folder / f"{Project.module}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(Project.folder))
    return Project()
