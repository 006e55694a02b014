"""Counts the products a model executes, and those with quantized operands, by watching the dispatched ops.

A *product* is a convolution, a matrix product, a lookup in an embedding table or a fused recurrent or attention kernel.
Every tensor carries two marks through the run: does it depend on the input data, and has a fake-quantize op made it,
from which only data movement came since. Products that no input reaches are constants, and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from qtk.operators.op_table import ROWS, Role

OPERANDS: dict[str, tuple[int, ...]] = {
    "convolution": (0, 1), "mkldnn_convolution": (0, 1), "linear": (0, 1), "mkldnn_linear": (0, 1),
    "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "matmul": (0, 1),
    "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2), "addmv": (1, 2),
    "embedding": (0,), "_embedding_bag": (0,), "_embedding_bag_forward_only": (0,),
    "torchvision::deform_conv2d": (0, 1),
}
"""Op → which arguments are multiplied."""

FUSED_ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math",
                   "_scaled_dot_product_fused_attention_overrideable", "_native_multi_head_attention",
                   "_transformer_encoder_layer_fwd")
FUSED_RECURRENT = ("mkldnn_rnn_layer", "lstm", "gru", "rnn_tanh", "rnn_relu")
MOVES = {name.partition(".")[0] for name, row in ROWS.items() if row.role in (Role.MOVEMENT, Role.MERGE)} | {
    "_reshape_alias", "_unsafe_view", "copy", "constant_pad_nd", "native_dropout", "_to_copy"}


@dataclass
class Products:
    """Numbers of executed products, and of those with all operands quantized."""

    weighted: int = 0
    weighted_quantized: int = 0
    activations: int = 0
    activations_quantized: int = 0


class ProductCounter(TorchDispatchMode):
    """Counts while it is active.

    Args:
        inputs: what the model is called with; the tensors in it are data.
    """

    def __init__(self, inputs: object) -> None:
        super().__init__()
        self.products = Products()
        self.data = WeakTensorKeyDictionary()
        self.quantized = WeakTensorKeyDictionary()
        for leaf in pytree.tree_leaves(inputs):
            if isinstance(leaf, Tensor):
                self.data[leaf] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        from_data = any(tensor in self.data for tensor in given)
        if from_data:
            self._count(name, args)
        quantized = name == "qtk::fake_quantize" or (
            name.removesuffix("_") in MOVES
            and all(tensor in self.quantized for tensor in given if tensor.is_floating_point()) and bool(given)
        )
        for tensor in made:
            if from_data:
                self.data[tensor] = True
            if quantized:
                self.quantized[tensor] = True
        return result

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name in FUSED_ATTENTION:
            self.products.activations += 2
        elif name in FUSED_RECURRENT:
            self.products.weighted += 2
        elif name in OPERANDS:
            operands = [args[index] for index in OPERANDS[name]]
            quantized = all(operand in self.quantized for operand in operands)
            lookup = "embedding" in name
            if lookup or sum(operand in self.data for operand in operands) == 1:
                self.products.weighted += 1
                self.products.weighted_quantized += quantized
            else:
                self.products.activations += 1
                self.products.activations_quantized += quantized


def count_products(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Products:
    """Counts the products of one run of ``model``."""
    model.train()
    model.eval()  # drops cached quantized weights
    with torch.no_grad(), ProductCounter((args, kwargs)) as counter:
        model(*args, **kwargs)
    return counter.products
