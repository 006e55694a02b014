"""Models of the zoo with recurrent nets in them."""

import torch
from torch import nn


class LstmTagger(nn.Module):
    """Two layers, both directions; all outputs and the last states are read."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 12, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)
        self.tags, self.sentence = nn.Linear(24, 5), nn.Linear(12, 3)

    def forward(self, tokens):
        outputs, (hidden, cell) = self.lstm(self.embed(tokens))
        return self.tags(outputs), self.sentence(hidden[-1] + cell[-1])


class GruClassifier(nn.Module):
    """Time first, no biases, a start state that is a parameter."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(16, 12, bias=False)
        self.start = nn.Parameter(torch.randn(1, 1, 12) / 3)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        _, hidden = self.gru(x.transpose(0, 1), self.start.expand(-1, x.shape[0], -1).contiguous())
        return self.head(hidden[0])


class ProjectedLstm(nn.Module):
    """The hidden state is projected; a plain RNN reads it."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 12, batch_first=True, proj_size=6)
        self.rnn = nn.RNN(6, 8, batch_first=True, nonlinearity="relu")

    def forward(self, x):
        return self.rnn(self.lstm(x)[0])[0]


class Cells(nn.Module):
    """A loop of the user's own over three kinds of cell."""

    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(16, 8), nn.GRUCell(8, 8), nn.RNNCell(8, 8)

    def forward(self, x):
        state, gru, rnn = None, None, None
        for step in x.unbind(1):
            state = self.lstm(step, state)
            gru = self.gru(state[0], gru)
            rnn = self.rnn(gru, rnn)
        return rnn
