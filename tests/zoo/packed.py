"""``pack_padded_sequence`` as people write it: taggers and classifiers over sequences of several lengths."""

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

FEATURES, HIDDEN, STEPS = 4, 6, 5


class Net(nn.Module):
    """A recurrent net in both directions, and a head over its outputs, or over its last states."""

    def __init__(self, tagger=True, kind=nn.LSTM, **options):
        super().__init__()
        options = {"batch_first": True, "bidirectional": True, **options}
        self.rnn, self.tagger = kind(FEATURES, HIDDEN, **options), tagger
        self.head = nn.Linear((self.rnn.proj_size or HIDDEN) * (2 if self.rnn.bidirectional else 1), 3)

    def finish(self, outputs, states):
        if self.tagger:
            return self.head(outputs)
        hidden = states[0] if isinstance(states, tuple) else states
        return self.head(torch.cat(list(hidden[-2:]), -1) if self.rnn.bidirectional else hidden[-1])


class ToTotalLength(Net):
    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, states = self.rnn(packed)
        return self.finish(pad_packed_sequence(outputs, batch_first=True, total_length=x.shape[1])[0], states)


class ToLongest(Net):
    """Time first if the net is, and the lengths are returned."""

    def forward(self, x, lengths):
        first = self.rnn.batch_first
        outputs, states = self.rnn(pack_padded_sequence(x, lengths.cpu(), first, enforce_sorted=False))
        outputs, lengths = pad_packed_sequence(outputs, first)
        return self.finish(outputs, states), lengths, states


class SortedBefore(Net):
    """Sequences come sorted; padding is no zero."""

    def forward(self, x, lengths):
        outputs, states = self.rnn(pack_padded_sequence(x, lengths, batch_first=True))
        return self.finish(pad_packed_sequence(outputs, batch_first=True, padding_value=-0.5)[0], states)


class SortedByHand(Net):
    def forward(self, x, lengths):
        lengths, order = lengths.sort(descending=True)
        outputs, (hidden, cell) = self.rnn(pack_padded_sequence(x[order], lengths, batch_first=True))
        back = order.argsort()
        outputs, _ = pad_packed_sequence(outputs, batch_first=True)
        return self.finish(outputs[back], (hidden[:, back], cell))


class LastOutput(Net):
    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.size(1))
        return self.head(outputs.gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, outputs.shape[-1])).squeeze(1))


class FirstStates(Net):
    """States are inputs."""

    def forward(self, x, lengths, hidden, cell):
        packed = pack_padded_sequence(x, lengths, self.rnn.batch_first, enforce_sorted=False)
        outputs, states = self.rnn(packed, (hidden, cell))
        return self.finish(pad_packed_sequence(outputs, self.rnn.batch_first)[0], states), states


class PackedData(Net):
    """The elements of a packed sequence are read, and packed again; two nets on one sequence."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.second = nn.Linear(2 * HIDDEN, HIDDEN), nn.Dropout(0.1), nn.GRU(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, x, lengths):
        first, _ = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        again = PackedSequence(self.linear(self.drop(first.data)), *first[1:])
        second, _ = self.second(again)
        return self.head(pad_packed_sequence(second, batch_first=True)[0]), second.data.mean(0)


class InPython(Net):
    """Its code branches on data: the net is an island that is called with a packed sequence."""

    def forward(self, x, lengths):
        if float(x.sum()) > 1e9:
            return x
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.finish(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0], None)


def sequences(count=3, seed=0, lengths=None, ordered=False, time_first=False):
    """Padded sequences and their lengths; the longest may be shorter than the padding."""
    generator = torch.Generator().manual_seed(seed)
    if lengths is None:
        lengths = torch.randint(1, STEPS + 1, (count,), generator=generator)
    lengths = torch.as_tensor(lengths)
    lengths = lengths.sort(descending=True).values if ordered else lengths
    x = torch.randn(len(lengths), STEPS, FEATURES, generator=generator)
    return (x.transpose(0, 1).contiguous() if time_first else x), lengths


def states(net, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    steps = net.num_layers * (2 if net.bidirectional else 1)
    shapes = (steps, count, net.proj_size or HIDDEN), (steps, count, HIDDEN)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)
