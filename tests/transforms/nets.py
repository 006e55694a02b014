"""Small nets with batch norms in every position, and what becomes of each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """``model`` in float64 and eval mode, with the parameters and statistics of its batch norms drawn at random."""
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            if module.affine:
                nn.init.uniform_(module.weight, -1.5, 1.5)
                nn.init.normal_(module.bias)
    return model.double().eval()


class SharedPair(nn.Module):
    """One convolution and its batch norm, called twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn(self.conv(F.relu(self.bn(self.conv(x)))))


class SharedConvolution(nn.Module):
    """One convolution in front of two batch norms, as in the heads of detectors."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn1, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn2(self.conv(F.relu(self.bn1(self.conv(x)))))


class SharedNorm(nn.Module):
    """One batch norm behind two convolutions."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.bn = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn(self.conv1(x)) + self.bn(self.conv2(x))


class ReadTwice(nn.Module):
    """The output of the convolution is read beside the batch norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        return F.relu(self.bn(y)) + y


class InFront(nn.Module):
    """A batch norm whose output two linear layers read, one of which pads nothing and one of which is grouped."""

    def __init__(self, padding=0):
        super().__init__()
        self.bn = nn.BatchNorm2d(4)
        self.conv1, self.conv2 = nn.Conv2d(4, 6, 3, padding=padding), nn.Conv2d(4, 6, 3, padding=padding, groups=2)

    def forward(self, x):
        y = self.bn(x)
        return self.conv1(y) + self.conv2(y)


class PreActivation(nn.Module):
    """Batch norm, ReLU, convolution on a concatenation, as in DenseNet."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn, self.conv2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.conv2(F.relu(self.bn(torch.cat([x, self.conv1(x)], 1))))


class Transposed(nn.Module):
    """A linear layer over tokens, whose channels a transpose brings to the axis of the batch norm."""

    def __init__(self):
        super().__init__()
        self.fc, self.bn = nn.Linear(5, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.bn(self.fc(x).transpose(1, 2))


class InRows(nn.Module):
    """Tokens are the rows of the batch norm, and tokens again behind it."""

    def __init__(self):
        super().__init__()
        self.fc, self.bn = nn.Linear(5, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        rows = self.bn(self.fc(x).flatten(0, 1))
        return F.relu(rows.reshape(len(x), 7, 6))


class SomeTokens(Transposed):
    """The batch norm sees some of the tokens."""

    def forward(self, x):
        return self.bn(self.fc(x)[:, 2:].transpose(1, 2))


class Flattened(nn.Module):
    """A batch norm of one axis behind a convolution of two, and one of rows behind one of a single position."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.last, self.bn2 = nn.Conv2d(4, 6, 3), nn.BatchNorm1d(6), nn.Conv1d(6, 5, 16), (
            nn.BatchNorm1d(5))

    def forward(self, x):
        return self.bn2(self.last(self.bn(self.conv(x).flatten(2))).flatten(1))


class Computed(nn.Module):
    """The weight is computed from parameters."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn(self.conv(x))


class InPython(nn.Module):
    """A model that stays Python; its blocks, one of them called twice, become islands."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        y = self.block(x)
        if float(y.sum()) > -1e9:  # control flow on data: no graph of the whole
            y = self.block(y)
        return self.last(y)


def pair(layer: nn.Module, norm: nn.Module) -> nn.Module:
    return nn.Sequential(layer, norm)


IMAGE, SEQUENCE, VOLUME, VECTOR = (2, 4, 6, 6), (2, 4, 9), (2, 4, 5, 5, 5), (3, 4)

INTO_LAYERS = {
    "conv1d": (lambda: pair(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)), SEQUENCE),
    "conv2d": (lambda: pair(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)), IMAGE),
    "conv3d": (lambda: pair(nn.Conv3d(4, 6, 3), nn.BatchNorm3d(6)), VOLUME),
    "grouped": (lambda: pair(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), IMAGE),
    "depthwise": (lambda: pair(nn.Conv2d(4, 8, 3, groups=4, bias=False), nn.BatchNorm2d(8)), IMAGE),
    "transposed1d": (lambda: pair(nn.ConvTranspose1d(4, 6, 3, stride=2), nn.BatchNorm1d(6)), SEQUENCE),
    "transposed2d": (lambda: pair(nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6)), IMAGE),
    "transposed3d": (lambda: pair(nn.ConvTranspose3d(4, 6, 2), nn.BatchNorm3d(6)), VOLUME),
    "linear": (lambda: pair(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)), VECTOR),
    "without_affine": (lambda: pair(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6, affine=False)), IMAGE),
    "linear_on_tokens": (Transposed, (2, 7, 5)),
    "linear_in_rows": (InRows, (2, 7, 5)),
    "flattened": (Flattened, IMAGE),
    "some_tokens": (SomeTokens, (2, 7, 5)),
    "before_linear": (lambda: pair(nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False)), VECTOR),
    "before_convolutions": (InFront, IMAGE),
    "before_transposed": (lambda: pair(nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 1, groups=2)), IMAGE),
    "flattened_before_linear": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2)), (3, 4, 1, 1)),
    "shared_pair": (SharedPair, IMAGE),
    "shared_norm": (SharedNorm, IMAGE),
    "both_sides": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.BatchNorm1d(6)), VECTOR),
    "islands": (InPython, IMAGE),
}
"""Name → model and shape of its input; every batch norm goes into a layer."""

INTO_SCALE_SHIFT = {
    "shared_convolution": (SharedConvolution, IMAGE, "conv.weight is shared with"),
    "read_twice": (ReadTwice, IMAGE, "conv:out is read by"),
    "padded": (lambda: InFront(padding=1), IMAGE, "conv1 pads its input"),
    "before_transposed_kernel": (
        lambda: pair(nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 3)), IMAGE, "1 is transposed"),
    "pre_activation": (PreActivation, IMAGE, "concat stands between|concat is no layer"),
    "computed_weight": (Computed, IMAGE, "the weight of conv"),
    "alone": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), IMAGE, "x:input|input:input"),
    "without_affine_alone": (
        lambda: nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.ReLU()), IMAGE, "is no layer"),
    "behind_relu": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)), IMAGE, "1 is no layer"),
    "flattened_space": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2)), (2, 4, 3, 3), "its channels are not"),
}
"""Name → model, shape of its input and the reason why a batch norm goes into no layer."""
