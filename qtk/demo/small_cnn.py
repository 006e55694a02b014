"""A small convolutional net with residual and depthwise blocks and a pooled head."""

from __future__ import annotations

from torch import Tensor, nn

from qtk.demo.digits import CLASSES


class ConvNormAct(nn.Sequential):
    """3×3 or 1×1 convolution without bias, batch norm, ReLU. Shape: [N, in, H, W] to [N, out, H/stride, W/stride]."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )


class Residual(nn.Module):
    """Two convolutions around a skip connection. Shape: [N, C, H, W], kept."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvNormAct(channels, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(x + self.norm(self.second(self.first(x))))
        return y


class DepthwiseSeparable(nn.Sequential):
    """A 3×3 convolution of each channel by itself, then a 1×1 over channels. Shape: as ``ConvNormAct``."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__(
            ConvNormAct(inputs, inputs, stride=stride, groups=inputs),
            ConvNormAct(inputs, outputs, 1),
        )


class SmallCnn(nn.Module):
    """27 thousand parameters. Shape: digits [N, 1, 8, 8] to scores [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNormAct(1, 16)
        self.blocks = nn.Sequential(
            Residual(16),
            DepthwiseSeparable(16, 32, stride=2),
            Residual(32),
            DepthwiseSeparable(32, 64),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(self.blocks(self.stem(images))).flatten(1)
        scores: Tensor = self.head(self.dropout(x))
        return scores
