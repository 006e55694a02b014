"""What is said of files that servers or transformers do not load."""

import warnings

import pytest
import torch
from torch import nn

import qtk
from qtk.export.compressed_tensors.compatibility import warn_of_files
from qtk.export.compressed_tensors.layers import layers_of
from tests.export.compressed_tensors.models import BLOCKS, STATIC, Siblings, Two, X, simulated


def said(sim):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_files(layers_of(sim.model))
    return [str(each.message) for each in caught]


@pytest.mark.medium
def test_layers_of_one_value_have_one_scheme():
    assert said(simulated(Siblings(), {"dtype": "int4", **BLOCKS})) == []
    eight = {"match": {"path": "k"}, "weight": {"dtype": "int8", "granularity": "per_channel"}}
    (message,) = said(simulated(Siblings(), {"dtype": "int4", **BLOCKS}, [eight]))
    assert "q.weight and k.weight read the same value and are quantized in different ways" in message
    static = simulated(Siblings(), {"dtype": "int8"}, inputs=STATIC)
    assert said(static) == []  # calibrated on the same values
    quantizer = static.quantizers["k:in[0]"]
    quantizer.load_encoding(qtk.Encoding(quantizer.spec, 2 * quantizer.scale))
    assert ["in different ways" in each for each in said(static)] == [True]


@pytest.mark.medium
def test_nvfp4_layers_of_one_value_have_one_scale_of_the_tensor():
    sim = simulated(Siblings().bfloat16(), {"dtype": "nvfp4"}, x=X.bfloat16())
    (message,) = said(sim)
    assert "q.weight and k.weight read the same value and have other scales of the tensor" in message
    qtk.round_scales(sim)
    assert said(sim) == []


@pytest.mark.medium
def test_four_bit_floats_in_a_model_that_is_not_bfloat16():
    (rounded,) = said(simulated(nn.Linear(64, 8), {"dtype": "nvfp4"}))
    assert "transformers rounds NVFP4 weights to bfloat16" in rounded
    assert said(simulated(nn.Linear(64, 8), {"dtype": "mxfp4"})) == []  # its weights are exact in bfloat16
    for name in ("nvfp4", "mxfp4"):
        (refused,) = said(simulated(nn.Linear(64, 8), {"dtype": name}, inputs={"dtype": name}))
        assert "does not run them with quantized inputs in a model of another dtype" in refused


@pytest.mark.medium
def test_inputs_that_are_lost_with_a_layer_that_is_dequantized():
    asymmetric = {"match": {"path": "last"}, "weight": {"dtype": "uint8", "symmetric": False,
                  "granularity": "per_channel"}, "input": "float"}
    sim = simulated(Two(), {"dtype": "int8", "granularity": "per_channel"}, [asymmetric], inputs=STATIC)
    (message,) = said(sim)
    assert "reads last.weight alone when it dequantizes all weights" in message
    assert "so loads first.weight with inputs in float" in message


@pytest.mark.medium
def test_scales_that_the_dtype_of_the_model_does_not_hold():
    sim = simulated(nn.Linear(64, 8).half(), {"dtype": "int8"}, x=X.half())
    (message,) = said(sim)
    assert "scales of 1 layers (weight, …) are rounded to float16" in message
    assert torch.finfo(torch.float16).eps / 2 >= qtk.round_scales(sim)["weight"] > 0
    assert said(sim) == []
