import torch
from torch import nn

import qtk
from qtk.graph.footprint import footprint

X = torch.randn(2, 3, 8, 8)


def test_a_footprint_counts_every_parameter_once():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 4, bias=False))
    rule = {"match": {"path": "2"}, "weight": {"bits": 4, "granularity": "per_block", "block_size": 32}}
    sim = qtk.QuantSim(model, X, config={"version": 1, "extends": "default", "rules": [rule]})
    found = footprint(sim.model)
    assert found.float_bytes == 4 * (8 * 27 + 8 + 4 * 288)
    assert found.codes_bytes == 8 * 27 + 4 * 288 // 2
    assert found.scales_bytes == 4 * 8 + 4 * 4 * 9
    assert found.left_bytes == 4 * 8
    assert found.quantized_bytes == found.codes_bytes + found.scales_bytes + found.left_bytes
    assert str(found) == ("parameters: 0.01 MB, quantized 0.00 MB (0.00 MB of codes, 0.00 MB of scales, "
                          "0.00 MB in float)")


def test_a_shared_weight_is_stored_once_and_int32_biases_have_no_scale():
    layer = nn.Linear(8, 8)
    sim = qtk.QuantSim(nn.Sequential(layer, nn.ReLU(), layer), X, config="onnxruntime")
    found = footprint(sim.model)
    assert (found.codes_bytes, found.scales_bytes, found.left_bytes) == (64 + 2 * 32, 32, 0)
    assert footprint(qtk.prepare_model(layer, X)).left_bytes == 4 * 72


def test_a_meta_model_has_the_footprint_of_one_with_values():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    real = qtk.QuantSim(model, X)
    dry = qtk.QuantSim(model.to("meta"), X.to("meta"))
    assert footprint(dry.model) == footprint(real.model)


def test_the_bias_that_a_fold_adds_has_a_size_in_numbers():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)).eval()
    found = footprint(qtk.QuantSim(model, X, config="onnxruntime").model)
    assert type(found.codes_bytes) is int
    assert found.codes_bytes == 8 * 27 + 4 * 8
    assert "MB of codes" in str(found)
