"""Convolutional nets of the zoo: the blocks of image models, and every conv and norm."""

import torch
import torch.nn.functional as F
from torch import nn


def conv_bn(inside, outside, stride=1, groups=1, activation=nn.ReLU):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(outside), activation()
    )


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = conv_bn(3, 8)
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.relu(y), 1), 1))


class DepthwiseSeparable(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            conv_bn(3, 8, 2), conv_bn(8, 8, groups=8), nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU6()
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 5))

    def forward(self, x):
        return self.head(self.features(x))


class InvertedResidual(nn.Module):
    """With squeeze-and-excitation and hardswish, as in mobilenet v3."""

    def __init__(self):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish(inplace=True))
        self.depthwise = conv_bn(16, 16, groups=16, activation=nn.Hardswish)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = nn.Sequential(nn.Conv2d(16, 4, 1, bias=False), nn.BatchNorm2d(4))

    def forward(self, x):
        y = self.depthwise(self.expand(x))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))), inplace=True)
        return x + self.project(gate * y)


class AllConvolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(3, 6, 3, padding=1, groups=3)
        self.conv2 = nn.Conv2d(6, 8, 3, padding="same", dilation=2)
        self.conv3 = nn.Conv3d(8, 4, (1, 3, 3), padding=(0, 1, 1), padding_mode="replicate")

    def forward(self, x):
        x = torch.relu(self.conv1(x)).unflatten(2, (4, 4))
        return self.conv3(torch.relu(self.conv2(x)).unsqueeze(2)).flatten(1)


class AllTransposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.ConvTranspose1d(4, 8, 4, stride=2, padding=1, groups=2)
        self.conv2 = nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1, groups=4)
        self.conv3 = nn.ConvTranspose3d(4, 2, 2, stride=2)

    def forward(self, x):
        x = F.relu(self.conv1(x)).unflatten(2, (4, 4))
        return self.conv3(F.relu(self.conv2(x)).unsqueeze(2))


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.group = nn.GroupNorm(2, 8)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.layer = nn.LayerNorm(6)

    def forward(self, x):
        return self.layer(self.instance(self.group(self.conv(x))))


class BatchNorms(nn.Module):
    """1d on vectors and sequences, 2d, 3d; without affine, without running statistics, cumulative, functional."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.plain = nn.BatchNorm2d(4)
        self.bare = nn.BatchNorm2d(4, affine=False)
        self.volume = nn.BatchNorm3d(4)
        self.sequence = nn.BatchNorm1d(4, momentum=None)
        self.untracked = nn.BatchNorm1d(4, track_running_stats=False)
        self.vector = nn.BatchNorm1d(4, momentum=0.3, eps=1e-3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        x = self.volume(self.bare(self.plain(self.conv(x))).unsqueeze(2)).squeeze(2)
        x = self.vector(self.untracked(self.sequence(x.flatten(2))).mean(2))
        return F.batch_norm(x, self.mean, self.var, training=self.training, momentum=0.2)


class Interpolations(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)

    def forward(self, x):
        x = self.shuffle(self.conv(x))
        x = F.pad(x, (1, 1, 1, 1), mode="reflect") + F.pad(x, (1, 1, 1, 1), value=-1.0)
        return F.interpolate(F.max_pool2d(self.up(x), 2), scale_factor=2.0, mode="nearest")


class WeightStandardised(nn.Module):
    """The conv's weight is computed from its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))
        self.gain = nn.Parameter(torch.ones(8, 1, 1, 1))
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))

    def forward(self, x):
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        x = F.conv2d(x, (self.weight - mean) * torch.rsqrt(var + 1e-5) * self.gain, padding=1)
        return self.head(F.silu(x).mean((2, 3)))


class Concatenated(nn.Module):
    """Dense block: every input of a concat is also read elsewhere."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(7, 4, 3, padding=1)
        self.conv3 = nn.Conv2d(11, 4, 1)

    def forward(self, x):
        a = torch.relu(self.conv1(x))
        b = torch.relu(self.conv2(torch.cat([x, a], 1)))
        return self.conv3(torch.cat([x, a, b], 1)) + a


class ConcatOfOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        x = self.conv(x)
        return torch.cat([x, x], dim=1)
