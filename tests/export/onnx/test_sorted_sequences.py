"""Which sorts of lengths a file keeps."""

import onnx
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import qtk
from qtk.export.onnx.qdq import export
from tests.export.onnx.simulated import run_onnx
from tests.zoo import packed
from tests.zoo.packed import sequences


class OrderIsRead(packed.Net):
    def forward(self, x, lengths):
        given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = self.rnn(given)
        return self.head(pad_packed_sequence(outputs, batch_first=True)[0]), x[given.sorted_indices]


class Reordered(packed.Net):
    """Packs again what is in the order of the sort, and does not put it back."""

    def forward(self, x, lengths):
        given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, state = self.rnn(PackedSequence(given.data, given.batch_sizes))
        return self.head(pad_packed_sequence(outputs, batch_first=True)[0]), state[0]


class StatesAsGiven(packed.Net):
    """First states that meet the sequences in the order of the sort."""

    def forward(self, x, lengths):
        given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        first = x[:, 0].sum(1)[None, :, None].expand(2, -1, self.rnn.hidden_size).contiguous()
        outputs, _ = self.rnn(PackedSequence(given.data, given.batch_sizes), (first, first))
        back = PackedSequence(outputs.data, outputs.batch_sizes, given.sorted_indices, given.unsorted_indices)
        return self.head(pad_packed_sequence(back, batch_first=True)[0]), x.sum()


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize(("make", "sorts"), [
    (OrderIsRead, 1), (Reordered, 1), (StatesAsGiven, 1), pytest.param(packed.ToLongest, 0, marks=pytest.mark.slow),
])
def test_a_sort_stays_only_where_its_order_is_read(make, sorts, tmp_path):
    torch.manual_seed(0)
    model = make(num_layers=1).eval()
    export(qtk.prepare_model(model, sequences()), sequences(), tmp_path / "model.onnx")
    assert [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node].count("TopK") == sorts
    x, lengths = sequences(lengths=[2, 5, 1, 4])
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(x, lengths))
    for found, wanted in zip(run_onnx(tmp_path / "model.onnx", x, lengths), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-5, rtol=0)
