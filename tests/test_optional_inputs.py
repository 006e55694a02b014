"""A model that takes inputs or not, as those of transformers do: labels, a mask, a flag that adds outputs."""

import copy
import inspect
import pickle
from collections import OrderedDict
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils import _pytree as pytree

import qtk
from qtk.errors import CalibrationError, CaptureError, EncodingError


@dataclass
class Output(OrderedDict):
    """As transformers' ``ModelOutput``: a dataclass, and a dict of those fields that are not ``None``."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


pytree.register_pytree_node(
    Output, lambda output: (list(output.values()), list(output)),
    lambda values, names: Output(**dict(zip(names, values, strict=True))),
    serialized_type_name="tests.Output", flatten_with_keys_fn=lambda output: (
        [(pytree.MappingKey(name), value) for name, value in output.items()], list(output)),
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.1)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        bias = None if mask is None else mask[:, None, :] > 0
        x = x + self.drop(self.out(scaled_dot_product_attention(q, k, v, bias)))
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Classifier(nn.Module):
    """Same shape as ``BertForSequenceClassification``."""

    def __init__(self):
        super().__init__()
        self.config = {"num_labels": 3}
        self.embed, self.blocks, self.head = nn.Embedding(20, 16), nn.ModuleList([Block()]), nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask=None, labels=None, output_hidden=False, return_dict=True, **kwargs):
        x, hidden = self.embed(input_ids), []
        for block in self.blocks:
            x = block(x, attention_mask)
            hidden.append(x)
        logits = self.head(x.mean(1))
        loss = None if labels is None else cross_entropy(logits, labels)
        if not return_dict:
            return logits if loss is None else (loss, logits)
        return Output(loss=loss, logits=logits, hidden=tuple(hidden) if output_hidden else None)


generator = torch.Generator().manual_seed(0)
IDS, LABELS = torch.randint(20, (16, 6), generator=generator), torch.randint(3, (16,), generator=generator)
MASK = torch.ones(16, 6, dtype=torch.long)
MASK[::2, 4:] = 0
PLAIN = {"input_ids": IDS}
KINDS = {
    "labels": {**PLAIN, "labels": LABELS},
    "mask": {**PLAIN, "attention_mask": MASK},
    "mask and labels": {**PLAIN, "attention_mask": MASK, "labels": LABELS},
    "flag": {**PLAIN, "output_hidden": True},
    "tuple": {**PLAIN, "return_dict": False},
}

ALL = tuple(KINDS.values())


def model():
    torch.manual_seed(0)
    return Classifier().eval()


def simulation(first=PLAIN, others=ALL, data=None, prepared=None, **options):
    variants = others if prepared is None else ()
    sim = qtk.QuantSim(prepared or model(), first, variants=variants, **options)
    sim.compute_encodings([first] if data is None else data, progress=False)
    return sim


def leaves(output):
    return pytree.tree_leaves(output)


def equal(a, b):
    return len(leaves(a)) == len(leaves(b)) and all(map(torch.equal, leaves(a), leaves(b)))


@pytest.fixture(scope="module")
def prepared():
    return qtk.prepare_model(model(), PLAIN, variants=ALL)


@pytest.fixture(scope="module")
def all_kinds(prepared):
    return simulation(data=[PLAIN, KINDS["mask"]], prepared=prepared)


@pytest.fixture(scope="module")
def with_labels():
    return qtk.prepare_model(model(), PLAIN, variants=[KINDS["labels"]])


@pytest.mark.medium
def test_each_kind_of_call_computes_what_the_model_does(prepared):
    for inputs in (PLAIN, *ALL):
        output, expected = prepared(**inputs), model()(**inputs)
        assert type(output) is type(expected)
        assert equal(output, expected)
    assert prepared.config == {"num_labels": 3}


@pytest.mark.slow
def test_what_is_common_is_one_site_with_one_encoding(all_kinds):
    sim = all_kinds
    logits = sim.model(**PLAIN).logits
    assert torch.equal(sim.model(**KINDS["labels"]).logits, logits)
    assert torch.equal(sim.model(**KINDS["flag"]).logits, logits)
    assert torch.equal(sim.model(**KINDS["tuple"]), logits)
    loss, with_tuple = sim.model(IDS, labels=LABELS, attention_mask=MASK).loss, sim.model(**KINDS["mask"]).logits
    assert torch.equal(loss, cross_entropy(with_tuple, LABELS))
    assert all(torch.equal(hidden, hidden.detach()) for hidden in sim.model(**KINDS["flag"]).hidden)


@pytest.mark.slow
def test_the_plan_is_that_of_the_example_inputs(all_kinds):
    """Variants add sites of their own, and change none."""
    alone = qtk.QuantSim(model(), PLAIN)
    for site, plan in alone.plan.items():
        assert all_kinds.plan[site] == plan
    assert alone.plan.unquantized.items() <= all_kinds.plan.unquantized.items()
    assert {site.name for site in all_kinds.plan} == set(alone.quantizers)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("first", "other"), [("labels", PLAIN), ("mask and labels", PLAIN), ("mask", KINDS["labels"])])
def test_either_may_come_first(first, other):
    """Calibrated by calls without labels, trained by calls with."""
    inputs = KINDS[first]
    sim = simulation(inputs, [other], data=[other])
    assert equal(sim.model(**other).logits, qtk_alone(other))
    assert len(leaves(sim.model(**inputs))) == len(inputs.keys() & {"labels"}) + 1


def qtk_alone(inputs):
    sim = qtk.QuantSim(model(), inputs)
    sim.compute_encodings([inputs], progress=False)
    return sim.model(**inputs).logits


@pytest.mark.medium
def test_training_with_labels_after_calibration_without(with_labels):
    sim = simulation(weight_bits=4, prepared=with_labels)
    assert sim.learn_ranges()
    optimizer = torch.optim.Adam([{"params": sim.weight_parameters()}, {"params": sim.range_parameters()}], 1e-2)
    sim.model.train()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = sim.model(**KINDS["labels"]).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    sim.model.eval()
    assert (sim.model(IDS).logits.argmax(1) == LABELS).float().mean() > 0.8


@pytest.mark.medium
def test_gradients_are_those_of_the_loss_outside(with_labels):
    inside, outside = simulation(prepared=with_labels), simulation(others=())
    inside.model(**KINDS["labels"]).loss.backward()
    cross_entropy(outside.model(**PLAIN).logits, LABELS).backward()
    other = dict(outside.model.named_parameters())
    for name, parameter in inside.model.named_parameters():
        assert torch.equal(parameter.grad, other[name].grad), name


@pytest.mark.slow
def test_compare_and_block_view(all_kinds):
    errors = all_kinds.compare([PLAIN, KINDS["mask"], KINDS["mask and labels"]], progress=False)
    assert {error.site for error in errors} <= set(all_kinds.quantizers)
    assert all(error.unpaired == 0 for error in errors)
    view = qtk.block_view(all_kinds, "blocks.*", checkpoint=True)
    for inputs in (PLAIN, *KINDS.values()):
        assert equal(view(**inputs), all_kinds.model(**inputs))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
                         ids=["deepcopy", "pickle"])
def test_copies_serve_all_kinds(all_kinds, copied):
    twin = copied(all_kinds.model)
    for inputs in (PLAIN, *KINDS.values()):
        assert equal(twin(**inputs), all_kinds.model(**inputs))
    with torch.no_grad():
        twin.head.bias += 1.0
    assert not equal(twin(**KINDS["labels"]), all_kinds.model(**KINDS["labels"]))


@pytest.mark.slow
def test_save_and_load(with_labels, tmp_path):
    variants = [KINDS["labels"], KINDS["mask"]]
    prepared = qtk.prepare_model(model(), PLAIN, variants=variants)
    sim = simulation(data=[PLAIN, KINDS["mask"]], prepared=prepared)
    sim.learn_ranges("head*")
    sim.save(tmp_path / "saved")
    again = qtk.QuantSim.load(tmp_path / "saved", prepared, PLAIN)
    for inputs in (PLAIN, *variants):
        assert equal(again.model(**inputs), sim.model(**inputs))
    with pytest.raises(EncodingError, match=r"graphs for 2 variants, .* and 1 are given"):
        qtk.QuantSim.load(tmp_path / "saved", with_labels, PLAIN)
    with pytest.raises(EncodingError, match=r"in another order;(.|\n)*variants\[0\] .*labels(.|\n)*ops, or their"):
        qtk.QuantSim.load(tmp_path / "saved", model(), PLAIN, variants=variants[::-1])
    with pytest.raises(EncodingError, match=r"or of other calls:(.|\n)*variants\[1\] .*mask.*, given: .*"):
        qtk.QuantSim.load(tmp_path / "saved", model(), PLAIN, variants=[KINDS["labels"], KINDS["flag"]])


@pytest.mark.slow
def test_files_are_those_of_the_example_inputs(tmp_path):
    pytest.importorskip("onnxruntime")
    sim, alone = simulation(others=[KINDS["labels"]]), simulation(others=())
    sim.export(tmp_path / "both")
    alone.export(tmp_path / "alone")
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == sorted(
        path.name for path in (tmp_path / "alone").iterdir())
    assert (tmp_path / "both/model.onnx").read_bytes() == (tmp_path / "alone/model.onnx").read_bytes()
    assert sim.verify_export(tmp_path / "both", [PLAIN, KINDS["labels"]], turns=0, progress=False).exact.top1 == 1.0
    with pytest.raises(CalibrationError, match=r"no batch is a call of the kind that was exported, .* input_ids"):
        sim.verify_export(tmp_path / "both", [KINDS["labels"]], turns=0, progress=False)


@pytest.mark.slow
def test_layerwise_methods_see_all_kinds():
    sim = simulation(others=[KINDS["labels"]], weight_bits=4)
    before = {name: encoding.scale for name, encoding in sim.encodings().items()}
    qtk.apply_seq_mse(sim, [PLAIN, KINDS["labels"]], num_candidates=5, progress=False)
    assert any(not torch.equal(encoding.scale, before[name]) for name, encoding in sim.encodings().items())


@pytest.mark.slow
@pytest.mark.filterwarnings("error:the hooks of the model")
def test_padded_tokens_of_a_kind_of_call_are_left_out_as_by_a_model_of_that_kind_alone():
    padded = {"input_ids": torch.where(MASK == 1, IDS, 19), "attention_mask": MASK}
    several = qtk.QuantSim(model(), PLAIN, variants=[padded], weight_bits=4)
    alone = qtk.QuantSim(model(), padded, weight_bits=4)
    for sim in (several, alone):
        sim.compute_encodings([padded], valid="attention_mask", progress=False)
        qtk.apply_seq_mse(sim, [padded], num_candidates=5, valid="attention_mask", progress=False)
    expected = alone.encodings()
    assert expected.keys() <= several.encodings().keys()
    assert all(torch.equal(several.encodings()[name].scale, encoding.scale) for name, encoding in expected.items())
    assert equal(several.model(**padded), alone.model(**padded))


@pytest.mark.slow
def test_a_compiled_model_serves_all_kinds_without_breaks(all_kinds):
    compiled = torch.compile(all_kinds.model, backend="eager", fullgraph=True)
    for inputs in (PLAIN, KINDS["labels"]):
        assert equal(compiled(**inputs), all_kinds.model(**inputs))


@pytest.mark.slow
def test_hooks_of_the_model_that_a_kind_of_call_does_not_run_are_a_warning(recwarn):
    sim, called = simulation(), []
    sim.model.register_forward_hook(lambda *call: called.append(call))
    sim.model(**PLAIN)
    assert len(called) == 1
    assert not [each for each in recwarn if "hooks of the model" in str(each.message)]
    with pytest.warns(UserWarning, match=r"hooks of the model are not called.*block_view"):
        sim.model(**KINDS["labels"])
    assert len(called) == 1


@pytest.mark.medium
def test_it_follows_to_another_dtype(all_kinds):
    twin = copy.deepcopy(all_kinds.model).to(torch.float64)
    assert twin(**KINDS["mask and labels"]).loss.dtype is torch.float64


@pytest.mark.medium
def test_trainers_read_the_signature_of_the_original(all_kinds):
    for read in (inspect.signature(all_kinds.model.forward), inspect.signature(copy.deepcopy(all_kinds.model).forward)):
        assert list(read.parameters) == ["input_ids", "attention_mask", "labels", "output_hidden", "return_dict"]
        assert read.parameters["labels"].default is None


@pytest.mark.slow
def test_a_call_of_another_kind_says_what_to_add():
    sim = simulation(others=[KINDS["labels"]])
    with pytest.raises(CaptureError, match=r"(?s)no graph serves .*input attention_mask .*variants of qtk"):
        sim.model(IDS, MASK)
    alone = simulation(others=())
    with pytest.raises(CaptureError, match=r"input labels was not given .* variants"):
        alone.model(**KINDS["labels"])


@pytest.mark.medium
def test_a_simulation_of_a_prepared_model_takes_inputs_of_its_first_kind(with_labels, tmp_path):
    prepared = with_labels
    for in_place in (False, True):
        with pytest.raises(CaptureError, match=r"of the kind of a variant.* pass inputs like .*first.*int64 \[16, 6\]"):
            qtk.QuantSim(prepared, KINDS["labels"], in_place=in_place)
        with pytest.raises(CaptureError, match="no graph serves calls with such inputs"):
            qtk.QuantSim(prepared, KINDS["mask"], in_place=in_place)
    sim = qtk.QuantSim(prepared, (IDS,))
    sim.compute_encodings([PLAIN], progress=False)
    sim.export(tmp_path / "sim", formats="encodings")
    assert sim.model(**KINDS["labels"]).loss.ndim == 0


class TwoHeads(nn.Module):
    """A flag selects what is computed, with weights of its own."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.a, self.b = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2), nn.Linear(4, 5)
        self.norm.running_mean.fill_(0.3)

    def forward(self, x, fine=False):
        x = self.norm(self.body(x)).relu().mean((2, 3))
        return self.b(x) if fine else self.a(x)


@pytest.mark.medium
def test_what_one_kind_computes_alone_is_quantized_and_needs_data_of_that_kind():
    x = torch.randn(4, 3, 8, 8)
    float_model = TwoHeads().eval()
    sim = qtk.QuantSim(float_model, x, variants=[{"x": x, "fine": True}])
    assert {"a.weight", "b.weight", "a:out", "b:out"} <= set(sim.quantizers)
    with pytest.raises(CalibrationError, match="no data reached 1 sites: b:out"):
        sim.compute_encodings([x], progress=False)
    sim.compute_encodings([x, {"x": x, "fine": True}], progress=False)
    for fine in (False, True):  # the batch norm is folded for both
        difference = (sim.model(x, fine=fine) - float_model(x, fine=fine)).abs().max()
        assert 0 < difference < 0.1 * float_model(x, fine=fine).abs().max()


class Branching(nn.Module):
    """Python that no capture follows, around modules that are called with a mask or without."""

    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(16, 2)

    def forward(self, x, mask=None):
        x = self.block(x, mask)
        return self.head(-x if x.sum() > 1e9 else x)


@pytest.mark.slow
def test_islands_have_a_graph_for_each_kind():
    x, net = torch.randn(2, 6, 16), Branching().eval()
    prepared = qtk.prepare_model(net, x, variants=[(x, MASK[:2])])
    assert prepared.report.rung == "python"
    sim = qtk.QuantSim(prepared, x)
    sim.compute_encodings([x, (x, MASK[:2])], progress=False)
    for call in ((x,), (x, MASK[:2])):
        torch.testing.assert_close(sim.model(*call), net(*call), rtol=0, atol=0.2)
