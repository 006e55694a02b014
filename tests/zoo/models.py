"""The zoo: small models, each with one thing in it that a graph tool gets wrong. All export in well under a second.

>>> ZOO["residual"].run(ZOO["residual"].model()).shape
torch.Size([2, 5])
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.zoo import attention, convolutions, experts, recurrent, structure, values
from tests.zoo.entry import Entry, Inputs, images, sequences, tokens, vectors

ZOO: dict[str, Entry] = {}


def _add(
    name: str,
    builder: Callable[[], nn.Module],
    inputs: Callable[[int], Inputs],
    *,
    dynamic: bool = True,
    trains: bool = True,
) -> None:
    ZOO[name] = Entry(name, builder, inputs, dynamic, trains)


def _nested(batch: int) -> Inputs:
    pair = [torch.randn(batch, 8), torch.randn(batch, 8)]
    return (pair, {"extra": torch.randn(batch, 8), "nothing": None}, 3, True)


_add("residual", convolutions.Residual, images())
_add("depthwise_separable", convolutions.DepthwiseSeparable, images())
_add("inverted_residual", convolutions.InvertedResidual, images(4))
_add("all_convolutions", convolutions.AllConvolutions, lambda batch: torch.randn(batch, 3, 16))
_add("all_transposed", convolutions.AllTransposed, lambda batch: torch.randn(batch, 4, 8))
_add("norms", convolutions.Norms, images())
_add("batch_norms", convolutions.BatchNorms, images())
_add("interpolations", convolutions.Interpolations, images())
_add("weight_standardised", convolutions.WeightStandardised, images())
_add("concatenated", convolutions.Concatenated, images())
_add("concat_of_one", convolutions.ConcatOfOne, images())

_add("vit", attention.TinyViT, images())
_add("language_model", attention.TinyLanguageModel, tokens())
_add("fused_attention", attention.FusedAttention,
     lambda batch: (torch.randn(batch, 5, 16), torch.arange(batch) % 4 + 1))
_add("masked_fill", attention.MaskedFill,
     lambda batch: {"hidden_states": torch.randn(batch, 5, 16), "attention_mask": torch.ones(batch, 5).triu(-1)})
_add("torch_encoder_layer", attention.Torchs, sequences())

if experts.TRACES_GROUPED_PRODUCTS:
    _add("grouped_experts", experts.GroupedExperts, vectors(experts.WIDTH))
_add("gathered_experts", experts.GatheredExperts, vectors(experts.WIDTH))
_add("dispatched_experts", experts.DispatchedExperts, vectors(experts.WIDTH))

_add("lstm", recurrent.LstmTagger, tokens())
_add("gru", recurrent.GruClassifier, sequences())
_add("projected_lstm", recurrent.ProjectedLstm, sequences())
_add("recurrent_cells", recurrent.Cells, sequences(3))

_add("two_inputs", structure.TwoInputs, lambda batch: (torch.randn(batch, 3, 8, 8), torch.randn(batch, 8)))
_add("intermediate_outputs", structure.Intermediate, images())
_add("equal_names", structure.EqualNames, vectors())
_add("dict_output", structure.DictOutput, vectors())
_add("nested_output", structure.NestedOutput, vectors())
_add("dataclass_output", structure.DataclassOutput, vectors())
_add("nested_input", structure.NestedInput, _nested)
_add("keyword_input", structure.KeywordInput,
     lambda batch: {"scale": 0.5, "x": torch.randn(batch, 8), "mask": torch.ones(batch, 1)})
_add("reused_module", structure.ReusedModule, vectors())
_add("reused_block", structure.ReusedBlock, vectors())
_add("tied", structure.Tied, vectors())
_add("functional", structure.Functional, images())

_add("splits", values.Splits, vectors())
_add("in_place", values.InPlace, images())
_add("side_path", values.SidePath, vectors())
_add("stacks_and_scatters", values.StacksAndScatters, vectors())
_add("scalar_arithmetic", values.ScalarArithmetic, vectors())
_add("functional_dropout", values.FunctionalDropout, vectors())
_add("gated", values.Gated, vectors())
_add("creations", values.Creations, vectors())
_add("no_grad", values.NoGrad, vectors())
_add("branches_on_training", values.StochasticDepth, vectors(), trains=False)
_add("fixed_batch", values.FixedBatch, lambda batch: torch.randn(4, 8), dynamic=False)
