import json
from functools import partial

import pytest
import torch

from qtk.aimet import encodings_aimet
from qtk.aimet.encodings_aimet import read
from qtk.aimet.fields import NamedEncoding
from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock, PerChannel
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.errors import EncodingError, ExportError

SHAPES = {"fc.weight": (3, 20), "head.weight": (6, 4)}


def named(encodings):
    """A name with a colon is that of an operator's output, one without that of a parameter."""
    return [NamedEncoding(name, each, ":" not in name, SHAPES.get(name)) for name, each in encodings.items()]


def export_0_6_1(encodings, path):
    encodings_aimet.export_0_6_1(named(encodings), path)


def export_1_0_0(encodings, path):
    encodings_aimet.export_1_0_0(named(encodings), path)


def export_2_0_0(encodings, path):
    encodings_aimet.export_2_0_0(named(encodings), path)


def zeros(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def encodings():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.rand(3, 5, generator=generator) + 1e-6
    tall = torch.rand(2, 4, generator=generator) + 1e-6
    return {
        "conv.weight": Encoding(QuantSpec(dtype("int4"), PerChannel(0), symmetric=True), torch.tensor([1 / 3, 0.1])),
        "fc.weight": Encoding(QuantSpec(dtype("int8"), PerBlock((1, 4)), symmetric=True, narrow_range=True), blocks),
        "head.weight": Encoding(
            QuantSpec(dtype("uint4"), PerBlock((3, 1))), tall, torch.arange(8, dtype=torch.int32).reshape(2, 4)
        ),
        "relu:out": Encoding(QuantSpec(dtype("uint8")), torch.tensor([0.1]), zeros(17)),
        "gelu:out": Encoding(QuantSpec(dtype("int8")), torch.tensor([0.1]), zeros(-100)),
        "silu:out": Encoding(QuantSpec(dtype("uint16")), torch.tensor([0.1]), zeros(0)),
        "x:input": Encoding(QuantSpec(dtype("int16"), PerChannel(-1)), torch.tensor([0.1, 7.0]), zeros(-32768, 32767)),
    }


def specs(encodings):
    return {site: encoding.spec for site, encoding in encodings.items()}


@pytest.mark.parametrize("export", [export_1_0_0, export_2_0_0])
def test_round_trip_keeps_every_bit(export, encodings, tmp_path):
    export(encodings, tmp_path / "e.json")
    back = read(tmp_path / "e.json", specs(encodings), shapes=SHAPES)
    assert set(back) == set(encodings)
    for site, encoding in encodings.items():
        assert back[site].equals(encoding), site


def test_schema_1_0_0_as_aimet_writes_it(encodings, tmp_path):
    export_1_0_0(encodings, tmp_path / "e.json")
    data = json.loads((tmp_path / "e.json").read_text())
    assert set(data) == {"version", "producer", "activation_encodings", "param_encodings", "excluded_layers"}
    assert data["version"] == "1.0.0"
    activations = {record["name"]: record for record in data["activation_encodings"]}
    parameters = {record["name"]: record for record in data["param_encodings"]}
    assert list(activations) == ["relu:out", "gelu:out", "silu:out", "x:input"]
    assert list(parameters) == ["conv.weight", "fc.weight", "head.weight"]
    assert activations["relu:out"] == {
        "name": "relu:out", "dtype": "INT", "enc_type": "PER_TENSOR", "bw": 8, "is_sym": False,
        "scale": [0.10000000149011612], "offset": [-17],
    }
    assert parameters["conv.weight"]["enc_type"] == "PER_CHANNEL"
    assert parameters["conv.weight"]["offset"] == [-8, -8]
    assert parameters["fc.weight"]["enc_type"] == "PER_BLOCK"
    assert parameters["fc.weight"]["block_size"] == 4
    assert parameters["fc.weight"]["offset"] == [-128] * 15
    assert parameters["head.weight"]["block_size"] == 3


def test_excluded_layers_are_named(encodings, tmp_path):
    encodings_aimet.export_1_0_0(named(encodings), tmp_path / "e.json", excluded=["head", "blocks.0"])
    assert json.loads((tmp_path / "e.json").read_text())["excluded_layers"] == ["head", "blocks.0"]
    assert set(read(tmp_path / "e.json", specs(encodings), shapes=SHAPES)) == set(encodings)


def test_a_parameter_is_told_by_its_site_not_by_its_name(encodings, tmp_path):
    odd = [NamedEncoding("odd:weight", encodings["conv.weight"], is_parameter=True),
           NamedEncoding("relu:out", encodings["relu:out"], is_parameter=False)]
    encodings_aimet.export_1_0_0(odd, tmp_path / "e.json")
    data = json.loads((tmp_path / "e.json").read_text())
    assert [record["name"] for record in data["param_encodings"]] == ["odd:weight"]
    assert [record["name"] for record in data["activation_encodings"]] == ["relu:out"]


def without_blocks(encodings):
    return {name: each for name, each in encodings.items() if not isinstance(each.spec.granularity, PerBlock)}


def test_schema_0_6_1_keeps_every_bit_of_what_it_holds(encodings, tmp_path):
    held = without_blocks(encodings)
    export_0_6_1(held, tmp_path / "e.json")
    back = read(tmp_path / "e.json", specs(held))
    assert list(back) == [*(name for name in held if ":" in name), *(name for name in held if ":" not in name)]
    assert all(back[name].equals(encoding) for name, encoding in held.items())
    with pytest.raises(ExportError, match=r"fc\.weight: AIMET's schema 0\.6\.1 holds no blocks"):
        export_0_6_1(encodings, tmp_path / "e.json")


def test_schema_0_6_1_as_aimet_writes_it(encodings, tmp_path):
    encodings_aimet.export_0_6_1(named(without_blocks(encodings)), tmp_path / "e.json", excluded=["head"])
    data = json.loads((tmp_path / "e.json").read_text())
    assert set(data) == {"version", "producer", "activation_encodings", "param_encodings", "excluded_layers"}
    assert (data["version"], data["excluded_layers"]) == ("0.6.1", ["head"])
    tenth = torch.tensor(0.1).item()
    assert data["activation_encodings"]["relu:out"] == [{
        "bitwidth": 8, "dtype": "int", "is_symmetric": "False", "min": tenth * -17, "max": tenth * 238, "offset": -17,
        "scale": tenth,
    }]
    assert [record["offset"] for record in data["param_encodings"]["conv.weight"]] == [-8, -8]
    assert {record["is_symmetric"] for record in data["param_encodings"]["conv.weight"]} == {"True"}


def test_offset_is_the_real_minimum_in_scales_for_both_signs(encodings, tmp_path):
    # AIMET's meaning, independent of ours: minimum = offset · scale
    export_1_0_0(encodings, tmp_path / "e.json")
    data = json.loads((tmp_path / "e.json").read_text())
    for record in data["activation_encodings"]:
        encoding = encodings[record["name"]]
        minimum = torch.tensor(record["offset"]) * encoding.scale
        assert torch.equal(minimum, encoding.minimum), record["name"]


def test_schema_2_0_0_as_aimet_writes_it(encodings, tmp_path):
    export_2_0_0(encodings, tmp_path / "e.json")
    data = json.loads((tmp_path / "e.json").read_text())
    assert set(data) == {"version", "producer", "encodings"}
    records = {record.pop("name"): record for record in data["encodings"]}
    assert list(records) == list(encodings)
    third, tenth = torch.tensor([1 / 3, 0.1]).tolist()
    assert records["conv.weight"] == {"output_dtype": "int4", "y_scale": [third, tenth], "axis": 0}
    assert records["relu:out"] == {"output_dtype": "uint8", "y_scale": tenth, "y_zero_point": 17}
    assert records["gelu:out"] == {"output_dtype": "int8", "y_scale": tenth, "y_zero_point": -100}
    assert records["silu:out"] == {"output_dtype": "uint16", "y_scale": tenth}
    assert records["x:input"]["axis"] == -1
    assert records["head.weight"] == {
        "output_dtype": "uint4", "y_scale": encodings["head.weight"].scale.tolist(),
        "y_zero_point": [[0, 1, 2, 3], [4, 5, 6, 7]], "axis": 0, "block_size": 3,
    }


@pytest.mark.parametrize("export", [export_1_0_0, export_2_0_0])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 1)])
def test_blocks_the_schemas_cannot_hold(export, sizes, tmp_path):
    blocks = PerBlock(sizes)
    encoding = Encoding(QuantSpec(dtype("int8"), blocks, symmetric=True), torch.ones(blocks.qparam_shape((4, 4))))
    with pytest.raises(ExportError, match=r"fc.weight: .* exactly one axis"):
        export({"fc.weight": encoding}, tmp_path / "e.json")


def test_blocks_of_a_convolution_over_its_whole_kernel(tmp_path):
    blocks = PerBlock((1, 2, -1, -1))
    scale = torch.rand(blocks.qparam_shape((3, 4, 5, 5))) + 0.1
    encodings = {"conv.weight": Encoding(QuantSpec(dtype("int4"), blocks, symmetric=True), scale)}
    for export in (export_1_0_0, export_2_0_0):
        export(encodings, tmp_path / "e.json")
        back = read(tmp_path / "e.json", specs(encodings), shapes={"conv.weight": (3, 4, 5, 5)})
        assert back["conv.weight"].equals(encodings["conv.weight"])


def test_schema_1_0_0_needs_shapes_for_blocks(encodings, tmp_path):
    export_1_0_0(encodings, tmp_path / "e.json")
    with pytest.raises(EncodingError, match=r"fc.weight: .*pass the tensor's in shapes"):
        read(tmp_path / "e.json", specs(encodings))


@pytest.mark.parametrize("export", [export_1_0_0, export_2_0_0])
def test_a_site_of_another_model_is_named_with_the_nearest(export, encodings, tmp_path):
    export({"relu_1:out": encodings["relu:out"]}, tmp_path / "e.json")
    with pytest.raises(EncodingError, match=r"'relu_1:out'.*did you mean 'relu:out'"):
        read(tmp_path / "e.json", specs(encodings))


@pytest.mark.parametrize("export", [export_1_0_0, export_2_0_0])
@pytest.mark.parametrize(
    ("site", "spec"),
    [
        ("relu:out", QuantSpec(dtype("uint4"))),
        ("relu:out", QuantSpec(dtype("uint8"), PerChannel(0))),
        ("fc.weight", QuantSpec(dtype("int8"), PerBlock((1, 5)), symmetric=True)),
        ("relu:out", QuantSpec(dtype("int8"), symmetric=True)),
    ],
)
def test_a_record_that_contradicts_the_plan(export, site, spec, encodings, tmp_path):
    export({site: encodings[site]}, tmp_path / "e.json")
    with pytest.raises(EncodingError, match=f"{site}: .*planned as {spec}".replace("(", r"\(").replace(")", r"\)")):
        read(tmp_path / "e.json", {site: spec}, shapes=SHAPES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": "0.6.1", "activation_encodings": {}}', r"not an AIMET .* version is '0.6.1'"),
        ('{"version": "0.6.1", "activation_encodings": {"relu:out": []}, "param_encodings": {}}', "relu:out: needs a"),
        ('{"version": "0.6.1", "activation_encodings": {"relu:out": 1}, "param_encodings": {"relu:out": 1}}', "twice"),
        ('{"version": "2.0.0", "encodings": [{"name": "relu:out"}, {"name": "relu:out"}]}', "'relu:out' twice"),
        ('{"version": "2.0.0", "encodings": [{"y_scale": 1.0}]}', "a record without a name"),
        ('{"version": "2.0.0", "encodings": [{"name": "relu:out", "output_dtype": "uint8"}]}', "relu:out: not a tens"),
        (
            '{"version": "2.0.0", "encodings": [{"name": "relu:out", "output_dtype": "uint8", "y_scale": [1.0, 2.0]}]}',
            "relu:out: ",
        ),
    ],
)
def test_malformed_files(text, message, encodings, tmp_path):
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(EncodingError, match=message):
        read(tmp_path / "e.json", specs(encodings))


def test_symmetric_site_with_a_zero_point_is_refused(tmp_path):
    record = {"name": "w", "output_dtype": "int8", "y_scale": 0.5, "y_zero_point": 3}
    (tmp_path / "e.json").write_text(json.dumps({"version": "2.0.0", "encodings": [record]}))
    load = partial(read, tmp_path / "e.json")
    with pytest.raises(EncodingError, match="w: the zero point is not 0"):
        load({"w": QuantSpec(dtype("int8"), symmetric=True)})
    assert load({"w": QuantSpec(dtype("int8"))})["w"].zero_point.tolist() == [3]


def test_small_floats_have_names_in_2_0_0_and_no_place_in_1_0_0(tmp_path):
    spec = QuantSpec(dtype("fp8_e4m3"), PerChannel(0), symmetric=True)
    encodings = {"w": Encoding(spec, torch.tensor([0.5, 0.25]))}
    export_2_0_0(encodings, tmp_path / "two.json")
    record = json.loads((tmp_path / "two.json").read_text())["encodings"][0]
    assert record == {"name": "w", "output_dtype": "float8e4m3fn", "y_scale": [0.5, 0.25], "axis": 0}
    assert read(tmp_path / "two.json", {"w": spec})["w"].equals(encodings["w"])
    with pytest.raises(ExportError, match=r"w: AIMET's schema 1\.0\.0 holds no fp8_e4m3"):
        export_1_0_0(encodings, tmp_path / "one.json")
    six = {"w": Encoding(QuantSpec(dtype("fp6_e3m2"), symmetric=True), torch.ones(1))}
    with pytest.raises(ExportError, match="not fp6_e3m2"):
        export_2_0_0(six, tmp_path / "six.json")


def test_stacked_matrices_are_blocks_along_a_whole_axis_in_2_0_0_alone(tmp_path):
    spec = QuantSpec(dtype("int8"), PerBlock((1, -1, 1)), symmetric=True)
    shape = (4, 64, 16)
    scale = torch.rand(spec.granularity.qparam_shape(shape)) + 0.1
    tensors = [NamedEncoding("experts", Encoding(spec, scale), is_parameter=True, shape=shape)]
    encodings_aimet.export_2_0_0(tensors, tmp_path / "e.json")
    (record,) = json.loads((tmp_path / "e.json").read_text())["encodings"]
    assert (record["axis"], record["block_size"], len(record["y_scale"]), len(record["y_scale"][0])) == (1, 64, 4, 1)
    back = read(tmp_path / "e.json", {"experts": spec}, shapes={"experts": shape})
    assert torch.equal(back["experts"].scale, scale)
    with pytest.raises(ExportError, match=r"experts: AIMET's schema 1\.0\.0 stores no axis, .* schema 2\.0\.0 holds"):
        encodings_aimet.export_1_0_0(tensors, tmp_path / "e.json")


@pytest.mark.parametrize("export", [export_1_0_0, export_2_0_0])
def test_lpbq_is_integers_times_a_scale_for_each_channel(export, tmp_path):
    spec = QuantSpec(dtype("int4"), PerBlock((1, 4)), symmetric=True, scale_format=ScaleFormat.INT4)
    integers = torch.tensor([[16, 3, 1, 9, 5], [2, 16, 16, 7, 1], [1, 2, 3, 4, 5]])
    channel = torch.tensor([[1 / 3], [0.1], [7.0]])
    encodings = {"fc.weight": Encoding(spec, integers * channel)}
    export(encodings, tmp_path / "e.json")
    data = json.loads((tmp_path / "e.json").read_text())
    (record,) = data.get("encodings") or data["param_encodings"]
    if export is export_1_0_0:
        assert {name: record[name] for name in ("enc_type", "bw", "compressed_bw", "block_size", "is_sym")} == {
            "enc_type": "LPBQ", "bw": 8, "compressed_bw": 4, "block_size": 4, "is_sym": True}
        assert record["offset"] == [-128] * 3
        products = torch.tensor(record["per_block_int_scale"]).reshape(3, 5) * torch.tensor(record["scale"])[:, None]
    else:
        assert (record["output_dtype"], record["axis"], record["block_size"]) == ("int4", 1, 4)
        products = torch.tensor(record["per_block_int_scale"]) * torch.tensor(record["per_channel_float_scale"])
    assert torch.equal(products, integers * channel)
    assert read(tmp_path / "e.json", {"fc.weight": spec}, shapes=SHAPES)["fc.weight"].equals(encodings["fc.weight"])
