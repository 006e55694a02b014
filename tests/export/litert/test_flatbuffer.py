import numpy as np
import pytest
import torch

from qtk.errors import ExportError
from qtk.export.litert.flatbuffer import LiteRtModel
from tests.export.litert.small_file import needs_converter, small

pytestmark = needs_converter


def loaded():
    return LiteRtModel.load(small()[2] / "model.tflite")


def test_another_file_is_refused_with_its_name(tmp_path):
    (tmp_path / "a.tflite").write_bytes(b"no flatbuffer at all")
    with pytest.raises(ExportError, match=r"cannot read .*a\.tflite as a \.tflite file.*name one that sim\.export"):
        LiteRtModel.load(tmp_path / "a.tflite")


def test_tables_say_what_the_interpreter_says():
    from ai_edge_litert.interpreter import Interpreter

    model = loaded()
    interpreter = Interpreter(model_path=str(small()[2] / "model.tflite"))
    details = {each["index"]: each for each in interpreter.get_tensor_details()}
    compared = 0
    for tensor in model.tensors:
        if tensor.index in details:
            theirs = details[tensor.index]
            assert tensor.name == theirs["name"]
            assert list(tensor.shape) == list(theirs["shape"])
            if tensor.scale is not None:
                compared += 1
                np.testing.assert_array_equal(tensor.scale, theirs["quantization_parameters"]["scales"])
                np.testing.assert_array_equal(tensor.zero_point, theirs["quantization_parameters"]["zero_points"])
    assert compared > 5
    assert list(model.inputs) == [*interpreter.get_signature_list()["serving_default"]["inputs"]]


def test_metadata_are_added_and_replaced():
    model = loaded()
    model.set_metadata({"qtk.target": b"another", "mine": b"1"})
    again = LiteRtModel(model.to_bytes())
    assert again.metadata["qtk.target"] == b"another"
    assert again.metadata["mine"] == b"1"
    assert [op.kind for op in again.ops] == [op.kind for op in loaded().ops]


def test_codes_are_taken_and_returned():
    from ai_edge_litert.interpreter import Interpreter

    sim, x, folder = small()
    model = loaded()
    model.take_codes()
    assert {"QUANTIZE", "DEQUANTIZE"}.isdisjoint(op.kind for op in model.ops)
    interpreter, floats = (Interpreter(model_content=each) for each in (
        model.to_bytes(), (folder / "model.tflite").read_bytes()))
    encoding = sim.encodings()["input:input"]
    codes = (x[:1] / encoding.scale).round() + encoding.zero_point
    results = []
    for each, value in ((interpreter, codes.clamp(-128, 127).to(torch.int8)), (floats, x[:1])):
        each.allocate_tensors()
        each.set_tensor(each.get_input_details()[0]["index"], value.numpy())
        each.invoke()
        results.append(each.get_tensor(each.get_output_details()[0]["index"]))
    output = sim.encodings()["3:out"]
    np.testing.assert_array_equal((results[0].astype(np.float32) - int(output.zero_point)) * float(output.scale),
                                  results[1])
