"""A small bidirectional LSTM that reads a digit row by row in both directions."""

from __future__ import annotations

from torch import Tensor, nn

from qtk.demo.digits import CLASSES, SIDE


class SmallLstm(nn.Module):
    """37 thousand parameters, 8 time steps of 8 pixels. Shape: digits [N, 1, 8, 8] to scores [N, 10]."""

    def __init__(self, hidden: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SIDE, hidden, layers, batch_first=True, bidirectional=True, dropout=0.1)
        self.norm = nn.LayerNorm(2 * hidden)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(2 * hidden, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        states_NTH, _ = self.lstm(images.squeeze(1))  # forward and backward states side by side
        scores: Tensor = self.head(self.dropout(self.norm(states_NTH.mean(1))))
        return scores
