"""A small GRU that reads a digit row by row and classifies its last state."""

from __future__ import annotations

from torch import Tensor, nn

from qtk.demo.digits import CLASSES, SIDE


class SmallGru(nn.Module):
    """40 thousand parameters, 8 time steps of 8 pixels. Shape: digits [N, 1, 8, 8] to scores [N, 10]."""

    def __init__(self, hidden: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.gru = nn.GRU(SIDE, hidden, layers, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        _, last_LNH = self.gru(images.squeeze(1))  # of each layer
        scores: Tensor = self.head(self.dropout(self.norm(last_LNH[-1])))
        return scores
