import json
from dataclasses import replace

import pytest

from qtk.errors import ExportError
from qtk.report.certificate import Certificate, CertifiedRun
from qtk.report.difference import Difference
from qtk.report.runtime_nodes import FloatNode, RuntimeNodes
from qtk.report.verdict import FileRun, Level

RUN = CertifiedRun("m.tflite", "LiteRT", "LiteRT 2.3", "green", 1.0, 0.01, 0.0, 1.0, 50.0, None, 3, 0, 0.5, 1.0)
CERTIFICATE = Certificate("ONNX", "aa", {"m.tflite": "11"}, {"torch": "2.14"}, {"flags": "avx2"}, (RUN,), ("a line",),
                          {"OpenVINO": "openvino"})


def test_it_is_read_back_as_it_was_written(tmp_path):
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(CERTIFICATE.to_json()))
    assert Certificate.load(path) == CERTIFICATE


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other", "version": 1}'])
def test_another_file_is_refused_with_a_way_out(text, tmp_path):
    (tmp_path / "certificate.json").write_text(text)
    with pytest.raises(ExportError, match=r"certificate\.json is no certificate of version 1.*qtk verify --all"):
        Certificate.load(tmp_path / "certificate.json")


@pytest.mark.parametrize(("now", "worse"), [
    ({"files": {"m.tflite": "22"}}, "m.tflite has other bytes than were certified"),
    ({"files": {}}, "m.tflite is missing"),
    ({"files": {"m.tflite": "11", "n.onnx": "3"}}, "n.onnx is not certified"),
    ({"runs": ()}, "m.tflite was not run by LiteRT 2.3, which is missing here"),
    ({"runs": (replace(RUN, level="red"),)}, "m.tflite in LiteRT 2.3: the verdict was green and is red"),
    ({"runs": (replace(RUN, refusal="no kernel"),)}, "m.tflite in LiteRT 2.3: refused: no kernel"),
    ({"runs": (replace(RUN, sqnr_db=48.0),)},
     "m.tflite in LiteRT 2.3: the outputs were 50.0 dB and are 48.0 dB from the reference"),
    ({"runs": (replace(RUN, beyond_one_step=0.02),)}, "m.tflite in LiteRT 2.3: 2.00% of the values are over one step, "
                                                      "0.00% were"),
    ({"runs": (replace(RUN, float_nodes=2),)}, "m.tflite in LiteRT 2.3: 2 operators are in float, 0 were"),
])
def test_what_is_worse_is_named(now, worse):
    assert CERTIFICATE.changes(replace(CERTIFICATE, **now)) == ([worse], [])


def test_what_is_only_other_is_named_apart():
    now = replace(CERTIFICATE, versions={"torch": "2.15"}, cpu={"flags": "avx2 avx512_vnni"}, inputs="bb",
                  runs=(replace(RUN, latency_ms=9.0, sqnr_db=49.5, level="green"),))
    assert CERTIFICATE.changes(now) == ([], [
        "torch was 2.14 and is 2.15", "flags was avx2 and is avx2 avx512_vnni",
        "the inputs are not the inputs of the certificate"])
    assert CERTIFICATE.changes(CERTIFICATE) == ([], [])


def test_it_holds_the_figures_of_a_run():
    total = Difference("outputs", 10, 0.1, 0.0, 0.2, 1.0, 40.0, 0.1)
    nodes = RuntimeNodes({"CONV_2D": 2}, (FloatNode("MUL", "a", "why", False),))
    site = Difference("a:out", 10, 0.1, 0.0, 0.2, 1.0, 40.0, 0.1)
    run = CertifiedRun.of("m", FileRun("w", "r", total, 0.9, (total,), (site,), nodes, 1.5, 3.0), Level.YELLOW)
    assert run == CertifiedRun("m", "w", "r", "yellow", 0.9, 0.1, 0.0, 1.0, 40.0, "a:out", 2, 1, 1.5, 3.0)
    refused = CertifiedRun.of("m", FileRun("w", "r", refusal="no"), Level.RED)
    assert refused.refusal == "no"
    assert replace(CERTIFICATE, runs=(RUN, refused)).level is Level.RED
    text = replace(CERTIFICATE, runs=(RUN, refused)).table().text()
    assert "refused" in text
    assert "50.0" in text


@pytest.mark.parametrize(("sqnr_db", "said"), [(float("inf"), None), (41.234, 41.23), (float("-inf"), -300.0)])
def test_outputs_that_are_nothing_but_noise_are_not_equal(sqnr_db, said):
    run = FileRun("LiteRT", "LiteRT 2.3", Difference("outputs", 1, 1.0, 0.0, 1.0, None, sqnr_db, None))
    made = CertifiedRun.of("m.tflite", run, Level.RED)
    assert made.sqnr_db == said
