"""Calibration and comparison of padded batches, against the same sequences without padding."""

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.data.valid_tokens import ValidTokens
from qtk.errors import CalibrationError

PAD = 19
IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, PAD, PAD]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
BATCH = {"ids": IDS, "mask": MASK}
SEQUENCES = [{"ids": IDS[:1], "mask": MASK[:1]}, {"ids": IDS[1:, :3], "mask": MASK[1:, :3]}]


class Encoder(nn.Module):
    """An encoder whose padding has larger values than any word, and a mean over the words."""

    def __init__(self, layer):
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(20, 16), layer, nn.Linear(16, 3)
        with torch.no_grad():
            self.words.weight[PAD] *= 50

    def forward(self, ids, mask):
        hidden = self.layer(self.words(ids), mask == 0)
        counted = mask[..., None].float()
        return self.head((hidden * counted).sum(1) / counted.sum(1))


class Torchs(nn.Module):
    """torch's layer: heads folded into the batch, tokens in front."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x, ignored):
        return self.layer(x, src_key_padding_mask=ignored)


class Unbound(nn.Module):
    """Queries, keys and values cut out of one tensor, products written out, rows flattened for the linear layers."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.mlp = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x, ignored):
        samples, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(samples, tokens, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1) * 8**-0.5).masked_fill(ignored[:, None, None], -1e4)
        context = (scores.softmax(-1) @ v).transpose(1, 2).reshape(samples, tokens, width)
        rows = (self.norm(x + self.out(context))).view(-1, width)
        return F.gelu(self.mlp(rows)).view(samples, tokens, width) + x


class PerToken(nn.Module):
    """Layers on channels in front: [samples, channels, tokens]."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(16, 8, 1), nn.Conv1d(8, 16, 1)

    def forward(self, x, ignored):
        return self.second(torch.relu(self.first(x.transpose(1, 2)))).transpose(1, 2)


LAYERS = {"torch": Torchs, "unbound": Unbound, "per_token": PerToken}


@functools.cache
def prepared(layer):
    torch.manual_seed(0)
    return qtk.prepare_model(Encoder(LAYERS[layer]()).eval(), BATCH, dynamic_shapes="all")


def simulation(layer, **settings):
    return qtk.QuantSim(copy.deepcopy(prepared(layer)), BATCH, **settings)


def of_data(sim):
    """Site → encoding, of the values that depend on data."""
    return {name: each for name, each in sim.encodings().items() if not name.endswith("weight")}


def pooled(name):
    return name.startswith(("sum", "div", "head"))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("valid", ["mask", pytest.param(lambda batch: batch["mask"].bool(), marks=pytest.mark.slow)],
                         ids=["name", "function"])
def test_padding_leaves_no_trace_in_ranges(layer, valid):
    padded, alone, all_rows = simulation(layer), simulation(layer), simulation(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        padded.compute_encodings([BATCH], valid=valid, progress=False)
    alone.compute_encodings(SEQUENCES, progress=False)
    all_rows.compute_encodings([BATCH], progress=False)
    expected, wrong, moved = of_data(alone), of_data(all_rows), 0
    for name, found in of_data(padded).items():
        torch.testing.assert_close(found.scale, expected[name].scale, rtol=1e-5, atol=0, msg=name)
        moved += name not in wrong or not torch.allclose(found.scale, wrong[name].scale, rtol=1e-2)  # padding: a mask
    assert moved >= 2, "padding made no difference, so the test shows nothing"


@pytest.mark.medium
def test_histograms_count_valid_rows_alone():
    padded, alone = (qtk.QuantSim(
        Encoder(PerToken()).eval(), BATCH, dynamic_shapes="all", scheme="tf_enhanced") for _ in range(2))
    alone.model.load_state_dict(padded.model.state_dict(), strict=False)
    padded.compute_encodings([BATCH], valid="mask", progress=False)
    alone.compute_encodings([{"ids": IDS[:1, :4], "mask": MASK[:1, :4]}, {"ids": IDS[:1, 4:], "mask": MASK[:1, 4:]},
                             SEQUENCES[1]], progress=False)
    expected = of_data(alone)
    for name, found in of_data(padded).items():
        if not pooled(name):
            torch.testing.assert_close(found.scale, expected[name].scale, rtol=0.02, atol=0, msg=name)


@pytest.mark.medium
def test_compare_counts_valid_rows_alone():
    sim = simulation("per_token")
    sim.compute_encodings([BATCH], valid="mask", progress=False)
    found = {error.site: error.sqnr_db for error in sim.compare([BATCH], valid="mask", progress=False)}
    alone = {error.site: error.sqnr_db for error in sim.compare(SEQUENCES, progress=False)}
    all_rows = {error.site: error.sqnr_db for error in sim.compare([BATCH], progress=False)}
    assert found == pytest.approx(alone, abs=1e-3)
    assert found["layer.second:out"] != pytest.approx(all_rows["layer.second:out"], abs=1.0)


@pytest.mark.medium
def test_where_tokens_cannot_be_followed_all_rows_count_and_a_warning_says_so():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.fc = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x, mask):
            return self.fc(self.rnn(x)[0])

    inputs = torch.randn(2, 5, 8), MASK
    sim = qtk.QuantSim(Mixed().eval(), inputs, config="default")
    with pytest.warns(UserWarning, match=r"valid='mask': tokens cannot be followed to \d+ sites.*behind Recurrent"):
        sim.compute_encodings([inputs], valid="mask", progress=False)
    assert sim.encodings()["fc:out"].scale is not None


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize(("valid", "message"), [
    ("masks", r"valid='masks' names no input of this call, which has ids, mask"),
    (lambda batch: batch["mask"][:, 0], r"must give a tensor \[samples, tokens\], got shape \(2,\)"),
    (lambda batch: None, r"must give a tensor \[samples, tokens\], got a NoneType"),
    (lambda batch: batch["mask"] * 2.0, r"must be true or 1 for tokens that count"),
    (lambda batch: torch.ones(2, 7), r"no input of the model begins with its axes.*\(2, 7\)"),
])
def test_what_is_no_mask_is_refused(valid, message):
    sim = simulation("per_token")
    with pytest.raises(CalibrationError, match=message):
        sim.compute_encodings([BATCH], valid=valid, progress=False)
    assert not sim.encodings()


@pytest.mark.medium
def test_data_that_run_the_model_need_a_name():
    sim = simulation("per_token")
    with pytest.raises(CalibrationError, match="pass the name of an input"):
        sim.compute_encodings(lambda model: model(**BATCH), valid=lambda batch: batch["mask"], progress=False)
    sim.compute_encodings(lambda model: model(**BATCH), valid="mask", progress=False)
    alone = simulation("per_token")
    alone.compute_encodings(SEQUENCES, progress=False)
    torch.testing.assert_close(sim.encodings()["layer.second:out"].scale, alone.encodings()["layer.second:out"].scale)


class Pair(nn.Module):
    """An encoder-decoder whose padding has larger values than any word, on both sides."""

    def __init__(self):
        super().__init__()
        self.words, self.encoder = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.queries, self.keys, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.words.weight[PAD] *= 50

    def forward(self, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask):
        encoded = torch.relu(self.encoder(self.words(input_ids)))
        decoded = self.words(decoder_input_ids)
        scores = self.queries(decoded) @ self.keys(encoded).transpose(1, 2)
        context = scores.masked_fill(attention_mask[:, None] == 0, -1e4).softmax(-1) @ encoded
        return self.head(decoded + context) * decoder_attention_mask[..., None]


BOTH = ["attention_mask", "decoder_attention_mask"]
INPUTS = {"attention_mask": "input_ids", "decoder_attention_mask": ["decoder_input_ids"]}


def pair(length):
    ids, mask = torch.tensor([[3, 1, 4, 1, 5], [9, 2, PAD, PAD, PAD]])[:, :length], torch.ones(2, length).long()
    mask[1, 2:] = 0
    ids = torch.where(mask == 1, ids, PAD)
    padded = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    alone = [{"input_ids": IDS[row:row + 1, :first], "attention_mask": MASK[row:row + 1, :first],
              "decoder_input_ids": ids[row:row + 1, :last], "decoder_attention_mask": mask[row:row + 1, :last]}
             for row, (first, last) in enumerate(((5, length), (3, 2)))]
    return padded, alone


@functools.cache
def prepared_pair():
    torch.manual_seed(0)
    return qtk.prepare_model(Pair().eval(), pair(4)[0], dynamic_shapes="all")


def ranges(data, valid=None):
    sim = qtk.QuantSim(copy.deepcopy(prepared_pair()), pair(4)[0])
    sim.compute_encodings(data, valid=valid, progress=False)
    return of_data(sim)


@pytest.mark.medium
@pytest.mark.parametrize("length", [4, 5])  # 5: both sides are as long
@pytest.mark.parametrize("valid", [BOTH, INPUTS], ids=["list", "mapping"])
def test_both_sides_of_an_encoder_decoder_leave_their_padding_out(length, valid):
    padded, alone = pair(length)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ranges([padded], valid)
    expected, wrong = ranges(alone), ranges([padded])
    names = [name for name in found if not name.startswith("mul")]  # the last one sets padding to 0
    for name in names:
        if "masked_fill" in name or "softmax" in name or "matmul:out" in name:
            continue  # scores have elements of invalid keys, which the mask of queries does not leave out
        torch.testing.assert_close(found[name].scale, expected[name].scale, rtol=1e-5, atol=0, msg=name)
    for name in ("encoder:out", "relu:out", "head:out"):
        if name in found:
            assert float(wrong[name].scale / found[name].scale) > 5, name


@pytest.mark.medium
@pytest.mark.parametrize(("valid", "missed", "left"), [
    ("attention_mask", "decoder_input_ids", r"queries:out"), ("decoder_attention_mask", "input_ids", r"relu:out"),
])
def test_tokens_of_an_input_without_a_mask_are_warned_of(valid, missed, left):
    with pytest.warns(match=rf"sites have tokens of inputs that no mask covers \(.*{missed}.*\), where all rows count"):
        found = ranges([pair(4)[0]], valid)
    assert any(left.removesuffix(":out") in name for name in found)


@pytest.mark.medium
def test_layers_of_both_sides_see_their_tokens_alone():
    padded, alone = pair(4)
    weights = []
    for data, valid in (([padded], BOTH), (alone, None)):
        sim = qtk.QuantSim(copy.deepcopy(prepared_pair()), padded, weight_bits=2, activation_bits=None)
        sim.compute_encodings(None, progress=False)
        report = qtk.apply_gptq(sim, data, valid=valid, options=qtk.LayerwiseOptions(holdout=0, inputs="symfp"),
                                progress=False)
        weights.append({layer.name: layer.after for layer in report.layers})
    for name, error in weights[1].items():
        assert weights[0][name] == pytest.approx(error, rel=1e-3), name


@pytest.mark.medium
def test_a_mask_that_is_no_input_is_named():
    with pytest.raises(CalibrationError, match=r"'decoder_mask' names no input of this call, which has input_ids"):
        ranges([pair(4)[0]], ["attention_mask", "decoder_mask"])


class Returned(nn.Module):
    """Tokens in front of the samples, heads of scores, a pooled row, and a value of as many features as tokens."""

    def __init__(self):
        super().__init__()
        self.words, self.square = nn.Embedding(20, 5), nn.Linear(5, 5)

    def forward(self, ids, mask):
        hidden = self.square(self.words(ids))
        return hidden.transpose(0, 1), hidden @ hidden.transpose(1, 2), (hidden * mask[..., None]).sum(1), hidden[0]


@pytest.mark.medium
def test_tokens_are_followed_to_what_is_returned():
    sim = qtk.QuantSim(Returned().eval(), BATCH, weight_bits=None, activation_bits=8)
    sim.compute_encodings([BATCH], progress=False)
    tokens = ValidTokens(sim.model, "mask")
    counted = []
    with tokens.listening(), torch.no_grad():
        outputs = sim.model(**BATCH)
        counted = [tokens.counted_of_output(each) for each in outputs]
        doubled = tokens.counted_of_output(outputs[0].transpose(0, 1) * 2)
        other = tokens.counted_of_output(torch.ones(7))
    valid = MASK.bool()
    assert torch.equal(counted[0], valid.T[..., None].expand(5, 2, 5))
    assert torch.equal(counted[1], valid[:, :, None] & valid[:, None])
    assert counted[2] is None
    assert torch.equal(doubled, valid[..., None].expand(2, 5, 5))
    assert other is None
    assert ValidTokens(sim.model, None).counted_of_output(outputs[0]) is None


@pytest.mark.medium
def test_what_has_scales_of_an_axis_is_seen_as_a_whole():
    """Rows of tokens have no axis of heads; of one scale each sees its valid rows alone."""
    class Heads(nn.Module):
        def forward(self, x, mask):
            return (x.view(2, 3, 2, 2) * 2).flatten(2) + 0 * mask[..., None]

    rule = {"match": {"op": "mul"}, "output": {"bits": 8, "granularity": "per_channel", "axis": 2}}
    inputs = torch.ones(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]])
    inputs[0][0, 2] = 9.0
    sim = qtk.QuantSim(Heads(), inputs, config={"version": 1, "rules": [rule]}, dynamic_shapes=None)
    with pytest.warns(UserWarning, match="scales of an axis"):
        sim.compute_encodings([inputs], progress=False, valid="mask")
    assert float(sim.encodings()["x:input"].maximum) == pytest.approx(1, abs=0.01)
    assert sim.encodings()["mul:out"].maximum.tolist() == pytest.approx([18, 18], abs=0.1)
