import json
import math

import pytest
import torch

from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock, PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError
from qtk.export.encodings_json import export, load_object, parse, read, read_target


def bits(scale: torch.Tensor) -> list[int]:
    return scale.view(torch.int32).flatten().tolist()


@pytest.fixture
def encodings():
    generator = torch.Generator().manual_seed(0)
    awkward = torch.tensor([1 / 3, 1.1754944e-38, 3.4028235e38, 0.1, math.pi, 1e-45, 1.0, 16777217.0])
    return {
        "conv.weight": Encoding(QuantSpec(dtype("int4"), PerChannel(0), symmetric=True), awkward),
        "fc.weight": Encoding(
            QuantSpec(dtype("int8"), PerBlock((1, 4)), symmetric=True, narrow_range=True),
            torch.rand(3, 5, generator=generator) + 1e-6,
        ),
        "relu:out": Encoding(QuantSpec(dtype("uint8")), torch.tensor([0.1]), torch.tensor([17], dtype=torch.int32)),
        "x:input": Encoding(
            QuantSpec(dtype("int16"), PerChannel(-1)), torch.tensor([0.1, 7.0]), torch.tensor([-32768, 32767]).int()
        ),
    }


def test_every_bit_survives(encodings, tmp_path):
    export(encodings, tmp_path / "e.json")
    back = read(tmp_path / "e.json")
    assert list(back) == list(encodings)
    for site, encoding in encodings.items():
        assert back[site].spec == encoding.spec
        assert back[site].scale.shape == encoding.scale.shape
        assert bits(back[site].scale) == bits(encoding.scale)
        assert back[site].equals(encoding)


def test_the_file_is_plain_json_with_one_line_a_site(encodings, tmp_path):
    export(encodings, tmp_path / "e.json")
    text = (tmp_path / "e.json").read_text()
    data = json.loads(text)
    assert (data["format"], data["version"], data["producer"]) == ("qtk.encodings", 1, "qtk")
    assert data["encodings"]["relu:out"] == {
        "spec": {"dtype": "uint8", "granularity": "per_tensor", "symmetric": False, "narrow_range": False},
        "scale": [0.10000000149011612],
        "zero_point": [17],
    }
    assert len(text.splitlines()) == len(encodings) + 2


def test_no_encodings_is_a_file_too(tmp_path):
    export({}, tmp_path / "e.json")
    assert read(tmp_path / "e.json") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON: nested too deeply"),
        ('{"a":' * 200 + "1" + "}" * 200, "is not JSON: nested too deeply"),
        ('{"a": 1' + "0" * 5000 + "}", "is not JSON: .*digits"),
        ("[]", "expected an object"),
        ("{}", "is not a qtk.encodings file"),
        ('{"format": "qtk.encodings", "version": 9, "encodings": {}}', "version 9 is not known"),
    ],
)
def test_other_files_are_refused(text, message, tmp_path):
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(EncodingError, match=message):
        read(tmp_path / "e.json")


def test_missing_file(tmp_path):
    with pytest.raises(EncodingError, match=r"cannot read .*nothing.json"):
        read(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": [0.0]}, "relu:out: every scale must be finite and positive"),
        ({"scale": [[1.0], [1.0, 2.0]]}, "relu:out: not a tensor"),
        ({"scale": 1.0}, "relu:out: an encoding needs exactly"),
        ({"zero_point": None}, "relu:out: .*needs a zero point"),
        ({"zero_point": [256]}, "relu:out: every zero point must lie in 0…255"),
        ({"extra": 1}, "relu:out: an encoding needs exactly"),
        ({"spec": {"dtype": "uint99"}}, "relu:out: not a quantization spec"),
    ],
)
def test_malformed_records_name_their_site(change, message, encodings, tmp_path):
    export({"relu:out": encodings["relu:out"]}, tmp_path / "e.json")
    data = json.loads((tmp_path / "e.json").read_text())
    data["encodings"]["relu:out"].update(change)
    (tmp_path / "e.json").write_text(json.dumps(data))
    with pytest.raises(EncodingError, match=message):
        read(tmp_path / "e.json")



def test_the_roles_of_parameters_are_kept(encodings, tmp_path):
    export(encodings, tmp_path / "e.json", parameters={"fc.weight": "weights"})
    data = load_object(tmp_path / "e.json")
    assert parse(data, "e.json").parameters == {"fc.weight": "weights"}
    assert parse({**data, "parameters": {}}, "e.json").parameters == {}
    del data["parameters"]
    assert parse(data, "e.json").parameters is None  # a file of an older version
    for parameters in ([], {"fc.weight": "activations"}, {"fc.weight": 1}):
        with pytest.raises(EncodingError, match=r"e\.json: parameters holds"):
            parse({**data, "parameters": parameters}, "e.json")


def test_encodings_taken_out_by_hand_leave_their_roles_behind(encodings, tmp_path):
    export(encodings, tmp_path / "e.json", parameters={"gone.weight": "weights"})
    assert parse(load_object(tmp_path / "e.json"), "e.json").encodings.keys() == encodings.keys()


def test_the_target_is_kept_beside_the_encodings(encodings, tmp_path):
    export(encodings, tmp_path / "plain.json")
    export(encodings, tmp_path / "mine.json", target="mine")
    assert read_target(tmp_path / "plain.json") is None
    assert read_target(tmp_path / "mine.json") == "mine"
    assert list(read(tmp_path / "mine.json")) == list(encodings)
    named, plain = ((tmp_path / f"{name}.json").read_text() for name in ("mine", "plain"))
    assert named.replace(', "target": "mine"', "") == plain
