"""Scores as JSON and as a table."""

import json
import math
from dataclasses import replace

from qtk.report.summary import Score, Summary

SCORES = {
    "fp32": Score(0.99, None, 4000),
    "w8a8": Score(0.98, 40.25, 1100, onnxruntime_value=0.975, onnxruntime_agreement=1.0,
                  runtime="ONNX Runtime, optimizations on"),
    "tuned": Score(0.5, math.inf),
}


def test_the_json_has_the_keys_that_scripts_read():
    record = Summary("top1", {"cnn": SCORES}).to_json()
    assert record["models"]["cnn"] == {
        "fp32": {"top1": 0.99, "sqnr_db": None, "size_bytes": 4000},
        "w8a8": {"top1": 0.98, "sqnr_db": 40.25, "size_bytes": 1100,
                 "onnxruntime_top1": 0.975, "onnxruntime_agreement": 1.0,
                 "runtime": "ONNX Runtime, optimizations on"},
        "tuned": {"top1": 0.5, "sqnr_db": None, "size_bytes": None},
    }
    json.dumps(record, allow_nan=False)


def test_the_data_of_the_figures_are_named():
    summary = Summary("top1", {"cnn": SCORES}, measured_on="the evaluation data (a:b)")
    assert summary.to_json()["measured_on"] == "the evaluation data (a:b)"
    assert summary.table().title == "accuracy and error on the evaluation data (a:b), and size"
    assert "measured_on" not in Summary("top1", {}).to_json()


def test_another_metric_goes_by_its_name():
    record = Summary("miou", {"net": SCORES}).to_json()
    assert record["metric"] == "miou"
    assert record["models"]["net"]["w8a8"]["onnxruntime_miou"] == 0.975


def test_the_table_shows_shares_decibels_and_bytes():
    table = Summary("top1", {"cnn": SCORES, "vit": SCORES}).table()
    assert [column.heading for column in table.columns] == [
        "model", "setting", "top-1", "SQNR, dB", "size, bytes", "ONNX Runtime top-1", "agreement"
    ]
    assert table.rows[:3] == (
        ("cnn", "fp32", "99.00%", "–", "4,000", "–", "–"),
        ("cnn", "W8A8", "98.00%", "40.2", "1,100", "97.50%", "100.00%"),
        ("cnn", "tuned", "50.00%", "∞", "–", "–", "–"),
    )
    assert table.sections == (3,)


def test_a_value_that_is_no_share_is_not_shown_as_one():
    table = Summary("loss", {"net": {"fp32": Score(12.5, None, 1)}}).table()
    assert table.columns[2].heading == "loss"
    assert table.rows[0][2] == "12.5"


def test_the_text_ends_with_how_the_files_ran():
    summary = Summary("top1", {"cnn": SCORES, "vit": SCORES})
    assert summary.text() == f"{summary.table().text()}\n\nONNX Runtime, optimizations on"
    other = replace(SCORES["w8a8"], runtime="ONNX Runtime, optimizations off")
    assert Summary("top1", {"cnn": SCORES, "vit": SCORES, "lstm": {"w8a8": other}}).runtimes() == (
        "cnn W8A8, vit W8A8: ONNX Runtime, optimizations on\nlstm W8A8: ONNX Runtime, optimizations off"
    )


def test_without_exported_files_there_is_only_the_table():
    summary = Summary("loss", {"net": {"fp32": Score(12.5, None)}})
    assert summary.text() == summary.table().text()
