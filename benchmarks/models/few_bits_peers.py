"""Weights and activations of few bits in other toolkits: ModelOpt and Brevitas, by their own presets and examples.

Each quantizes what its preset for convolutional nets and transformers quantizes: weights per channel and the inputs of
linear and convolutional layers per tensor. The attention's products, sums, norms and the input's copy for a residual
stay float there; qtk's ``default`` config quantizes all of them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


def modelopt(model: nn.Module, batches: Sequence[Tensor], weight_bits: int, activation_bits: int,
             algorithm: str = "max") -> nn.Module:
    """ModelOpt's INT8 preset with other numbers of bits; symmetric, also for activations."""
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(mtq.INT8_DEFAULT_CFG)
    for rule in config["quant_cfg"]:
        bits = {"*weight_quantizer": weight_bits, "*input_quantizer": activation_bits}.get(rule["quantizer_name"])
        if bits is not None and "cfg" in rule:
            rule["cfg"]["num_bits"] = bits
    config["algorithm"] = algorithm
    return mtq.quantize(model, config, lambda quantized: [quantized(batch) for batch in batches])


def brevitas(model: nn.Module, batches: Sequence[Tensor], weight_bits: int, activation_bits: int) -> nn.Module:
    """Brevitas' post-training example: layers one by one, ranges by MSE, GPTQ on quantized inputs, bias correction."""
    from brevitas_examples.imagenet_classification.ptq.ptq_common import (
        apply_bias_correction,
        apply_gptq,
        calibrate,
        quantize_model,
    )

    loader = DataLoader([(image, 0) for image in torch.cat(list(batches))], batch_size=len(batches[0]))
    quantized = quantize_model(
        model, "layerwise", weight_bit_width=weight_bits, act_bit_width=activation_bits, bias_bit_width=None,
        weight_quant_granularity="per_channel", act_quant_percentile=99.999, act_quant_type="asym",
        scale_factor_type="float_scale", quant_format="int", layerwise_first_last_bit_width=weight_bits,
        weight_param_method="mse", act_param_method="mse",
    )
    with torch.no_grad():
        quantized(batches[0])  # its weight quantizers start at the first run
    calibrate(loader, quantized)
    with torch.no_grad():
        quantized(batches[0])
    apply_gptq(loader, quantized, act_order=True, use_quant_activations=True)
    apply_bias_correction(loader, quantized)
    return quantized.eval()


PEERS: dict[str, Callable[[nn.Module, Sequence[Tensor], int, int], nn.Module]] = {
    "ModelOpt": modelopt,
    "ModelOpt, SmoothQuant": partial(modelopt, algorithm="smoothquant"),
    "Brevitas, GPTQ": brevitas,
}


def quantized_by(peer: str, model: nn.Module, batches: Sequence[Tensor], weight_bits: int,
                 activation_bits: int) -> nn.Module:
    """The model, quantized by a peer. Raises: ImportError if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PEERS[peer](copy.deepcopy(model), batches, weight_bits, activation_bits)
