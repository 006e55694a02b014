import pytest

from qtk.report.stages import Stages, unseen


def test_the_bar_says_what_runs_and_how_much_is_done(capsys):
    with Stages(4, progress=True) as stages:
        stages.begin("encodings.json")
        assert "| 0/4 [" in capsys.readouterr().err.rpartition("exporting")[2]
        stages.of("model.onnx")("capturing")
        shown = capsys.readouterr().err.rpartition("exporting")[2]
        assert "| 1/4 [" in shown
        assert "model.onnx: capturing" in shown
    end = capsys.readouterr().err.rpartition("exporting")[2]
    assert "100%" in end
    assert "| 2/2 [" in end, "graphs that no input reaches have no files"
    assert "capturing" not in end


def test_a_stage_that_fails_stays_on_the_bar(capsys):
    stages = Stages(2, progress=True)
    stages.begin("model.onnx: writing")
    with pytest.raises(ValueError, match="full"), stages:
        raise ValueError("the disk is full")
    shown = capsys.readouterr().err.rpartition("exporting")[2]
    assert "| 0/2 [" in shown
    assert "model.onnx: writing" in shown


def test_nothing_is_printed_unasked(capsys):
    unseen("capturing")
    with Stages(1, progress=False) as stages:
        stages.begin("model.onnx: writing")
    assert stages.begun == ["model.onnx: writing"]
    assert capsys.readouterr().err == ""
