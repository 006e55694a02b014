"""Weights and activations of few bits in other toolkits, by their own presets and examples.

ModelOpt and Brevitas quantize what their presets for convolutional nets and transformers quantize: weights per channel
and the inputs of linear and convolutional layers per tensor. The attention's products, sums, norms and the input's copy
for a residual stay float there; qtk's ``default`` config quantizes all of them. llm-compressor quantizes the linear
layers of models of transformers, so digits_vit is wrapped as one, and its convolution stays float too. AutoRound takes
what enters a block to be as long as the model's input, [N, T] token ids, and fails on digits_vit, of 64 pixels and 16
tokens: "The size of tensor a (16) must match the size of tensor b (64)".
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from bench_language_peers import no_tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from qtk.demo.small_vit import SmallViT


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


def brevitas(model: nn.Module, batches: Sequence[Tensor], weight_bits: int, activation_bits: int,
             learned_round: str | None = None) -> nn.Module:
    """Brevitas' post-training example: layers one by one, ranges by MSE, GPTQ on quantized inputs, bias correction.

    With ``learned_round`` its learned rounding stands in the place of GPTQ, with the example's default settings.
    """
    from brevitas_examples.imagenet_classification.ptq.learned_round_utils import apply_learned_round
    from brevitas_examples.imagenet_classification.ptq.ptq_common import (
        apply_bias_correction,
        apply_gptq,
        calibrate,
        quantize_model,
    )
    from brevitas_examples.imagenet_classification.ptq.ptq_imagenet_args import create_args_parser

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
    if learned_round is None:
        apply_gptq(loader, quantized, act_order=True, use_quant_activations=True)
    else:
        apply_learned_round(quantized, loader, create_args_parser().parse_args(["--learned-round", learned_round]))
    apply_bias_correction(loader, quantized)
    return quantized.eval()


def pretrained(model: nn.Module, folder: str) -> nn.Module:
    """The model as one of transformers, whose config is in a folder. Raises: TypeError if it is not digits_vit."""
    import transformers

    if not isinstance(model, SmallViT):
        raise TypeError(f"llm-compressor quantizes linear layers, and {type(model).__name__} is made of others; use "
                        "digits_vit")

    class Config(transformers.PretrainedConfig):
        model_type = "digits"

    class Pretrained(transformers.PreTrainedModel):
        config_class, _no_split_modules = Config, ["Block"]

        def __init__(self) -> None:
            super().__init__(Config())
            self.model = model

        def forward(self, input_ids: Tensor, **_: object) -> Tensor:
            scores: Tensor = self.model(input_ids)
            return scores

    transformers.AutoConfig.register("digits", Config, exist_ok=True)
    result = Pretrained().eval().requires_grad_(False)
    result.config.save_pretrained(folder)
    result.config._name_or_path = folder
    return result


def llm_compressor(model: nn.Module, batches: Sequence[Tensor], weight_bits: int, activation_bits: int) -> nn.Module:
    """llm-compressor: GPTQ, weights per channel, activations per tensor with fixed ranges, both by MSE."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier

    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=weight_bits, symmetric=True, strategy="channel", observer="mse"),
        input_activations=QuantizationArgs(
            num_bits=activation_bits, symmetric=False, strategy="tensor", observer="mse"),
    )
    data = DataLoader([{"input_ids": batch} for batch in batches], batch_size=None)
    with tempfile.TemporaryDirectory() as folder:
        wrapped = pretrained(model, folder)
        oneshot(model=wrapped, processor=no_tokenizer(), recipe=[GPTQModifier(config_groups={"group_0": scheme})],
                dataset=data, num_calibration_samples=len(batches))
    return wrapped


PEERS: dict[str, Callable[[nn.Module, Sequence[Tensor], int, int], nn.Module]] = {
    "ModelOpt": modelopt,
    "ModelOpt, SmoothQuant": partial(modelopt, algorithm="smoothquant"),
    "Brevitas, GPTQ": brevitas,
    "Brevitas, learned rounding": partial(brevitas, learned_round="hard_sigmoid"),
    "llm-compressor, GPTQ": llm_compressor,
}


def quantized_by(peer: str, model: nn.Module, batches: Sequence[Tensor], weight_bits: int,
                 activation_bits: int) -> nn.Module:
    """The model, quantized by a peer. Raises: ImportError if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PEERS[peer](copy.deepcopy(model), batches, weight_bits, activation_bits)
