"""Models of the zoo whose inputs, outputs or parameters are put together in unusual ways."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.vector, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Linear(16, 4)

    def forward(self, image, vector):
        return self.head(torch.cat([self.image(image).mean((2, 3)), torch.relu(self.vector(vector))], 1))


class Intermediate(nn.Module):
    """Returns values from the middle, and the same value twice."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        a = self.conv1(x)
        b = self.conv2(torch.relu(a))
        return a, b, self.conv3(torch.relu(b)), a


class EqualNames(nn.Module):
    """Outputs whose names differ by a counter only; a name that looks like a second one."""

    def __init__(self):
        super().__init__()
        self.hidden_output, self.hidden_output_1 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden_output = self.hidden_output(x)
        hidden_output_1 = self.hidden_output_1(torch.relu(hidden_output))
        return hidden_output, hidden_output_1


class DictOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.boxes, self.scores = nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x):
        return {"boxes": self.boxes(x), "scores": self.scores(x).softmax(-1), "input": x}


class Pair(NamedTuple):
    first: Tensor
    rest: dict[str, object]


class NestedOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        y = self.fc(x)
        return Pair(y, {"list": [y + 1, (y * 2,)], "none": None, "number": 3})


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor | None = None


class DataclassOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = torch.relu(self.fc1(x))
        return Answer(self.fc2(hidden), hidden)


class NestedInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, pair, options, scale, double):
        a, b = pair
        y = self.fc(a) + b * scale
        if options["extra"] is not None:
            y = y + options["extra"]
        return y * 2 if double else y


class KeywordInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, mask=None, offset=None, *, scale=1.0):
        y = self.fc(x) * scale
        return y if mask is None else y * mask


class ReusedModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.relu, self.drop = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.5)

    def forward(self, x):
        x = self.drop(self.relu(self.fc(x)))
        return self.drop(self.relu(self.fc(x)))


class ReusedBlock(nn.Module):
    """One block under two names, called three times."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.second = self.first

    def forward(self, x):
        return self.first(self.second(self.first(x))) + x


class Tied(nn.Module):
    """One parameter in two modules, one of them transposed; another parameter nobody uses."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 6, bias=False), nn.Linear(6, 8)
        self.decoder_weight = self.encoder.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.never = nn.Linear(2, 2)
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)
        self.plain = torch.arange(8.0)

    def forward(self, x):
        y = F.linear(torch.tanh(self.encoder(x)), self.decoder_weight.t(), self.decoder.bias)
        return y + self.table + self.plain


class Functional(nn.Module):
    """Conv, linear and matmul on parameters that belong to no layer."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3, 3, 3) / 5)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 4) / 2), nn.Parameter(torch.randn(8, 5) / 3)])
        self.bias = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x):
        x = F.conv2d(x, self.kernel, stride=2).mean((2, 3))
        x = torch.relu(F.linear(x, self.weights[0]))
        return torch.einsum("bi,io->bo", x, self.weights[1]) + x @ self.weights[1] + self.bias
