"""Encodings come back from every format as they were, and a file that does not fit changes nothing."""

import copy
import json

import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.core.granularity import PerBlock
from qtk.errors import EncodingError
from qtk.workflow.load_encodings import LoadedEncodings
from tests.zoo.models import ZOO
from tests.zoo.prepared import pair, simulated, slow_but

FORMATS = ("encodings_json", "encodings_aimet_0.6.1", "encodings_aimet_1.0.0", "encodings_aimet_2.0.0",
           "encodings_aimet_2.1.0")
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
WEIGHT_RULE = {"match": {"path": "0"}, "weight": {"bits": 4}}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def fresh(**options):
    return qtk.QuantSim(net(), X, **options)


def calibrated(**options):
    sim = fresh(**options)
    sim.compute_encodings([X], progress=False)
    return sim


def only_file(folder):
    (file,) = folder.glob("*.json")
    return file


def exported(sim, folder, form):
    sim.export(folder, formats=form)
    return only_file(folder)


@pytest.fixture(scope="module")
def sim():
    return calibrated()


def assert_equal(left, right):
    assert list(left) == list(right)
    assert all(left[name].equals(right[name]) for name in left)


@pytest.mark.sample(4)
@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(
    ZOO, "residual", "concatenated", "masked_fill", "gru", "tied", "reused_module",
))
def test_a_file_loaded_and_exported_again_is_equal_byte_for_byte(name, tmp_path):
    sim = simulated(name)
    # a stack of matrices has a scale for each row of each: blocks along a whole axis, which 0.6.1 and 1.0.0 do not hold
    stacks = any(isinstance(decided.spec.granularity, PerBlock) for decided in sim.plan.values())
    for form in (FORMATS[0], *FORMATS[3:]) if stacks else FORMATS:
        file = exported(sim, tmp_path / form, form)
        again = qtk.QuantSim(pair(name)[1], ZOO[name].inputs())
        result = again.load_encodings(file)
        assert_equal(again.encodings(), sim.encodings())
        assert exported(again, tmp_path / f"{form} again", form).read_bytes() == file.read_bytes()
        assert set(result.loaded) == {site.name for site, decided in sim.plan.items() if decided.leader is None}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("config", "forms"),
    [
        ("onnxruntime", FORMATS),  # int32 biases
        ({"version": 1, "extends": "default", "rules": [{"match": {"op": "linear"}, "weight": {
            "dtype": "int4", "granularity": "per_block", "block_size": 4}}]}, FORMATS[:1] + FORMATS[2:]),
        ({"version": 1, "extends": "default", "rules": [{"match": {"op": "linear"}, "weight": {
            "dtype": "lpbq_int4", "block_size": 4}}]}, FORMATS[:1] + FORMATS[2:]),
        ({"version": 1, "extends": "default", "rules": [{"match": {"op": "linear"}, "weight": {
            "dtype": "fp8_e4m3"}}]}, (FORMATS[0], *FORMATS[3:])),
        ("dynamic", FORMATS[:1]),
    ],
)
def test_each_kind_of_encoding_comes_back(config, forms, tmp_path):
    sim = calibrated(config=config)
    for form in forms:
        file = exported(sim, tmp_path / form, form)
        again = fresh(config=config)
        again.load_encodings(file)
        assert exported(again, tmp_path / f"{form} again", form).read_bytes() == file.read_bytes()
        assert torch.equal(again.model(X), sim.model(X))


def test_int32_biases_have_the_lowest_code_of_their_type(tmp_path):
    sim = calibrated(config="onnxruntime")
    data = json.loads(exported(sim, tmp_path / "out", "encodings_aimet_1.0.0").read_text())
    (bias,) = [record for record in data["param_encodings"] if record["name"] == "0.bias"]
    assert (bias["bw"], set(bias["offset"])) == (32, {-2**31})


@pytest.mark.medium
def test_frozen_encodings_stay_and_others_are_computed_anew(sim, tmp_path):
    file = exported(sim, tmp_path / "out", "encodings_json")
    for freeze in (True, False):
        again = fresh()
        assert again.load_encodings(file, freeze=freeze).frozen is freeze
        again.compute_encodings([X * 3], progress=False)
        kept = all(again.encodings()[name].equals(each) for name, each in sim.encodings().items())
        assert kept is freeze


def test_frozen_ones_are_replaced_and_stay_frozen(sim):
    other = calibrated(weight_bits=8)
    other.set_range("1:out", 0.0, 100.0)
    other.load_encodings(sim.encodings(), freeze=False)
    assert_equal(other.encodings(), sim.encodings())
    assert [name for name, each in other.quantizers.items() if each.frozen] == ["1:out"]


@pytest.mark.medium
def test_a_learned_range_goes_on_from_what_was_loaded_or_is_fixed(sim):
    for freeze in (False, True):
        other = calibrated()
        other.learn_ranges()
        other.load_encodings(sim.encodings(), freeze=freeze)
        assert all(each.learns_range is not freeze for each in other.quantizers.values())
        assert_equal(other.encodings(), sim.encodings())


@pytest.mark.medium
def test_a_mapping_and_the_content_of_a_file_are_files_too(sim, tmp_path):
    data = json.loads(exported(sim, tmp_path / "out", "encodings_aimet_2.0.0").read_text())
    for source in (sim.encodings(), data):
        again = fresh()
        again.load_encodings(source)
        assert_equal(again.encodings(), sim.encodings())


def test_only_what_is_there_is_loaded_of_a_part(sim):
    again = fresh()
    weights = {name: each for name, each in sim.encodings().items() if name.endswith("weight")}
    with pytest.raises(EncodingError, match=r"1:out has no entry; partial=True"):
        again.load_encodings(weights)
    result = again.load_encodings(weights, partial=True)
    assert result.loaded == ("0.weight", "2.weight")
    assert result.missing == ("input:input", "1:out", "2:out")
    assert str(result) == "the mapping: 2 encodings loaded and frozen\nmissing: input:input, 1:out, 2:out"
    again.compute_encodings([X], only_missing=True, progress=False)
    assert_equal(again.encodings(), sim.encodings())


def test_an_unknown_name_is_refused_or_ignored_and_said(sim):
    extra = {**sim.encodings(), "1.out": sim.encodings()["1:out"], "0.bias": sim.encodings()["1:out"]}
    again = fresh()
    with pytest.raises(EncodingError) as refused:
        again.load_encodings(extra)
    assert "1.out is no site of the model; did you mean '1:out'?" in str(refused.value)
    assert "0.bias is left in float here (float by defaults)" in str(refused.value)
    assert again.encodings() == {}
    assert again.load_encodings(extra, strict=False).ignored == ("1.out", "0.bias")


@pytest.mark.medium
def test_sites_that_carried_a_mask_are_taken_out_as_they_were(tmp_path):
    class Masked(nn.Module):
        def forward(self, q, k, mask):
            return (q @ k.mT + mask).softmax(-1) @ k

    q = torch.randn(2, 4, 8)
    mask = torch.full((4, 4), float("-inf")).triu(1)
    sim = qtk.QuantSim(Masked(), (q, q, mask))
    sim.compute_encodings([(q, q, mask)], progress=False)
    assert sim.simulation.dropped
    file = exported(sim, tmp_path / "out", "encodings_json")
    again = qtk.QuantSim(Masked(), (q, q, mask))
    again.load_encodings(file)
    assert again.plan == sim.plan
    assert torch.equal(again.model(q, q, mask), sim.model(q, q, mask))
    assert exported(again, tmp_path / "again", "encodings_json").read_bytes() == file.read_bytes()


def record_of(data, name):
    records = data.get("encodings") or [*data["activation_encodings"], *data["param_encodings"]]
    return next(record for record in records if record["name"] == name)


@pytest.mark.medium
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("1.0.0", lambda data: record_of(data, "1:out").update(bw=16), r"1:out: bw is 16, .* planned as uint8"),
        ("1.0.0", lambda data: record_of(data, "1:out").update(enc_type="PER_CHANNEL"), r"1:out: enc_type is 'PER_CH"),
        ("1.0.0", lambda data: record_of(data, "1:out").update(scale=[0.0]), r"1:out: every scale must be finite"),
        ("1.0.0", lambda data: record_of(data, "1:out").update(scale=[float("nan")]), r"1:out: every scale must be f"),
        ("1.0.0", lambda data: record_of(data, "1:out").update(offset=[-256]), r"1:out: every zero point must lie in"),
        ("1.0.0", lambda data: record_of(data, "0.weight").update(scale=[1.0] * 7, offset=[-128] * 7),
         r"0\.weight: its scale has shape \(7,\), the site of shape \(8, 8\) needs \(8,\)"),
        ("1.0.0", lambda data: record_of(data, "0.weight").update(offset=[0] * 8), r"0\.weight: the zero point is not"),
        ("2.0.0", lambda data: record_of(data, "0.weight").update(axis=1), r"0\.weight: axis is 1, .* needs 0"),
        ("2.0.0", lambda data: record_of(data, "output").update(output_dtype="int8"), r"output \(2:out\): output"),
        ("2.0.0", lambda data: data["encodings"].append(record_of(data, "1:out")), r"names '1:out' twice"),
        ("2.0.0", lambda data: data.update(version="3.0.0"), r"not an AIMET .* \(its version is '3.0.0'\)"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(form, change, said, sim, tmp_path):
    file = exported(sim, tmp_path / "out", f"encodings_aimet_{form}")
    data = json.loads(file.read_text())
    change(data)
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(data))
    again = fresh()
    with pytest.raises(EncodingError, match=said) as refused:
        again.load_encodings(broken)
    assert str(broken) in str(refused.value)
    assert again.encodings() == {}
    assert not any(each.frozen for each in again.quantizers.values())


def test_every_finding_is_listed(sim):
    again = fresh(weight_bits=4, activation_bits=None)
    with pytest.raises(EncodingError) as refused:
        again.load_encodings(sim.encodings())
    lines = str(refused.value).splitlines()[1:]
    assert [line.split()[0].rstrip(":") for line in lines] == ["0.weight", "2.weight", "input:input", "1:out", "2:out"]
    assert "it is int8 per_channel(axis=0) symmetric, the site is planned as int4" in lines[0]


def test_two_entries_of_one_encoding_must_agree():
    sim = simulated("concatenated")
    follower, leader = next((site, decided.leader) for site, decided in sim.plan.items() if decided.leader is not None)
    encodings = sim.encodings()
    broken = copy.copy(encodings)
    wrong = encodings[follower.name]
    broken[follower.name] = qtk.Encoding(wrong.spec, wrong.scale * 2, wrong.zero_point)
    again = qtk.QuantSim(pair("concatenated")[1], ZOO["concatenated"].inputs())
    with pytest.raises(EncodingError, match=f"{follower} differs from|{leader} differs from"):
        again.load_encodings(broken)
    del broken[leader.name]
    others = {name: each for name, each in broken.items() if sim.quantizers[name] is not sim.quantizers[leader.name]}
    again.load_encodings({**others, follower.name: wrong})
    assert again.encodings()[leader.name].equals(wrong)


@pytest.mark.medium
def test_an_int32_bias_has_the_scale_of_its_product():
    sim = calibrated(config="onnxruntime")
    encodings = sim.encodings()
    bias = encodings["0.bias"]
    broken = {**encodings, "0.bias": qtk.Encoding(bias.spec, bias.scale * 2)}
    again = fresh(config="onnxruntime")
    with pytest.raises(EncodingError, match=r"0\.bias: .* needs the scale of input:input times the scale of 0\.weight"):
        again.load_encodings(broken)
    again.load_encodings(broken, strict=False)
    assert_equal(again.encodings(), encodings)


@pytest.mark.medium
def test_dynamic_sites_take_no_encoding_and_are_compared(sim, tmp_path):
    dynamic = calibrated(config="dynamic")
    again = fresh(config="dynamic")
    with pytest.raises(EncodingError, match=r"planned as .* dynamic, each tensor in its own range"):
        again.load_encodings({**dynamic.encodings(), **{
            name: sim.encodings()["1:out"] for name, each in again.quantizers.items() if each.spec.dynamic}})
    file = exported(dynamic, tmp_path / "out", "encodings_json")
    with pytest.raises(EncodingError, match=r"dynamic, the site is planned as|is no site of the model"):
        fresh().load_encodings(file, partial=True)


@pytest.mark.medium
def test_nothing_of_a_file_that_fits_nowhere():
    with pytest.raises(EncodingError, match="no entry belongs to a site"):
        fresh().load_encodings({"a": calibrated().encodings()["1:out"]}, strict=False, partial=True)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())])
        self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(4, 2)

    def forward(self, x):
        x = self.pool(self.body[0](x)) * 2.0
        return self.fc(x.flatten(1))


def aimet_record(name, scale, offset):
    return {"name": name, "dtype": "INT", "enc_type": "PER_TENSOR", "bw": 8, "is_sym": False, "scale": [scale],
            "offset": [offset]}


def weight_record(name, count):
    return {"name": name, "dtype": "INT", "enc_type": "PER_CHANNEL", "bw": 8, "is_sym": True,
            "scale": [0.5] * count, "offset": [-128] * count}


@pytest.mark.medium
def test_a_file_of_aimet_itself(tmp_path):
    """With names as AIMET 2.42 wrote them for such a model, and an ONNX file beside that names input and output."""
    x = torch.randn(2, 3, 4, 4)
    sim = qtk.QuantSim(Named().eval(), x)
    assert {"body.0.1:out", "mul:out", "fc:out"} <= {site.name for site in sim.plan}
    data = {
        "version": "1.0.0", "producer": "aimet-torch 2.42.0", "excluded_layers": [], "quantizer_args": {},
        "activation_encodings": [
            aimet_record("image", 0.25, -7), aimet_record("/body.0/body.0.1/Relu_output_0", 0.5, 0),
            aimet_record("/pool/MaxPool_output_0", 0.5, 0), aimet_record("/Mul_output_0", 0.125, -128),
            aimet_record("/Flatten_output_0", 0.125, -128), aimet_record("logits", 2.0, -3),
        ],
        "param_encodings": [weight_record("body.0.0.weight", 4), weight_record("fc.weight", 2)],
    }
    file = tmp_path / "model.encodings"
    file.write_text(json.dumps(data))
    with pytest.raises(EncodingError, match=r"image is no site.*\n.*logits is no site"):
        sim.load_encodings(file)
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Identity", ["image"], ["logits"])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(
        [node], "g", [value("image", 1, None)], [value("logits", 1, None)])), tmp_path / "model.onnx")
    result = sim.load_encodings(file)
    assert result.ignored == ("/pool/MaxPool_output_0", "/Flatten_output_0")
    scales = {name: each.scale[0].item() for name, each in sim.encodings().items()}
    assert scales == {"x:input": 0.25, "body.0.0.weight": 0.5, "body.0.1:out": 0.5, "mul:out": 0.125, "fc.weight": 0.5,
                      "fc:out": 2.0}
    assert sim.encodings()["x:input"].zero_point.tolist() == [7]


def test_a_file_of_aimet_whose_names_are_those_of_an_fx_graph(tmp_path):
    """With names and metadata as AIMET 2.42 wrote them with torch 2.15 and ``dynamo=True``, in schema 2.1.0."""
    sim = qtk.QuantSim(Named().eval(), torch.randn(2, 3, 4, 4))
    value, nodes, last = onnx.helper.make_tensor_value_info, [], "image"
    for op, name, scopes, kind in [
        ("Conv", "conv2d", ["body.0", "body.0.0"], "conv2d"), ("Relu", "relu", ["body.0", "body.0.1"], "relu"),
        ("MaxPool", "max_pool2d", ["pool"], "max_pool2d"), ("Mul", "mul", [], "mul"), ("Reshape", "view", [], "view"),
        ("Gemm", "logits", ["fc"], "linear"),
    ]:
        nodes.append(onnx.helper.make_node(op, [last], [name]))
        nodes[-1].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(["", *scopes, name]))
        nodes[-1].metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value=repr(["", f"aten.{kind}.default"]))
        last = name
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(
        nodes, "g", [value("image", 1, None)], [value("logits", 1, None)])), tmp_path / "model.onnx")
    records = [{"name": name, "output_dtype": "uint8", "y_scale": scale} for name, scale in (
        ("image", 0.25), ("relu", 0.5), ("max_pool2d", 0.5), ("mul", 0.125), ("view", 0.125), ("logits", 2.0))]
    records += [{"name": name, "output_dtype": "int8", "y_scale": [0.5] * count, "axis": 0} for name, count in (
        ("body.0.0.weight", 4), ("fc.weight", 2))]
    (tmp_path / "model.encodings").write_text(json.dumps({"version": "2.1.0", "encodings": records}))
    result = sim.load_encodings(tmp_path / "model.encodings")
    assert result.ignored == ("max_pool2d", "view")
    assert {name: each.scale[0].item() for name, each in sim.encodings().items()} == {
        "x:input": 0.25, "body.0.0.weight": 0.5, "body.0.1:out": 0.5, "mul:out": 0.125, "fc.weight": 0.5, "fc:out": 2.0}


def test_the_file_of_modules_that_aimet_reads_itself():
    x = torch.randn(2, 3, 4, 4)
    sim = qtk.QuantSim(Named().eval(), x)

    def legacy(scale, offset, *, symmetric=False):
        return {"bitwidth": 8, "dtype": "int", "is_symmetric": str(symmetric), "scale": scale, "offset": offset}

    result = sim.load_encodings({
        "version": "1.0.0",
        "activation_encodings": {
            "body.0.0": {"input": {"0": legacy(0.25, -7)}}, "body.0.1": {"output": {"0": legacy(0.5, 0)}},
            "fc": {"output": {"0": legacy(2.0, -3)}},
        },
        "param_encodings": {"body.0.0.weight": [legacy(0.5, -128, symmetric=True)] * 4,
                            "fc.weight": [legacy(0.5, -128, symmetric=True)] * 2},
    }, partial=True)
    assert result.missing == ("mul:out",)
    assert sim.encodings()["x:input"].zero_point.tolist() == [7]
    assert sim.encodings()["fc:out"].scale.tolist() == [2.0]


def test_the_result_is_printed():
    result = LoadedEncodings("a.json", ("w",), ("b",), ("c",), frozen=False)
    assert str(result).splitlines() == ["a.json: 1 encodings loaded", "ignored: b", "missing: c"]


def test_several_scales_do_not_fit_one_tensor_whose_batch_is_free(sim, tmp_path):
    file = exported(sim, tmp_path / "out", "encodings_aimet_1.0.0")
    content = json.loads(file.read_text(encoding="utf-8"))
    record = content["activation_encodings"][0]
    for key in ("scale", "offset"):
        record[key] = record[key] * 2
    before = sim.encodings()
    with pytest.raises(EncodingError, match=record["name"]):
        sim.load_encodings(content)
    assert_equal(sim.encodings(), before)


def test_a_broken_onnx_file_beside_the_encodings_is_named(sim, tmp_path):
    content = {"activation_encodings": {"strange": []}, "param_encodings": {}, "version": "0.6.1"}
    (tmp_path / "model.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "model.onnx").write_text("version https://git-lfs.github.com/spec/v1", encoding="utf-8")
    with pytest.raises(EncodingError, match=r"model\.onnx.*is no ONNX file.*repair or remove it"):
        sim.load_encodings(tmp_path / "model.json")


def test_a_module_with_a_list_for_inputs_is_refused(sim):
    content = {"activation_encodings": {"0": {"input": [1]}}, "param_encodings": {}, "version": "0.6.1"}
    with pytest.raises(EncodingError, match="0: input holds a JSON list, expected an object"):
        sim.load_encodings(content)
