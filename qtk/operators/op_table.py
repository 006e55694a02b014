"""The op table: one row for each operator, with all that qtk knows about it. To add an operator, add a row.

The op's *role* decides where quantizers go: compute ops make new values, movement ops carry the
encoding of their input through, merges share one encoding over inputs and output, creations make constants, counts
are never quantized.
An op without a row neither receives nor passes an encoding, and the report names it.
"""

from __future__ import annotations

from dataclasses import replace

from qtk.operators.op_axes import (
    einsum_operand,
    factor,
    in_out,
    one_per_channel,
    permuted_axis,
    reshaped_axis,
    same_axis,
    same_axis_of_equal_rank,
    selected_axis,
    stacked_in_out,
    unexpanded_axis,
)
from qtk.operators.op_row import (
    Feeding,
    InputAxis,
    Mask,
    OpRow,
    Precision,
    Product,
    Role,
    Scaling,
    Tokens,
    out_in,
)

COMPUTE, MOVEMENT, MERGE, CREATE, COUNT = Role.COMPUTE, Role.MOVEMENT, Role.MERGE, Role.CREATE, Role.COUNT

ROWS: dict[str, OpRow] = {}
"""Name of an operator → its row: ``linear`` (of ATen), ``max.other`` (one overload), ``torchvision::roi_align``."""


def _add(ops: str, row: OpRow) -> None:
    for op in ops.split():
        assert op not in ROWS, f"op {op} has two rows"
        ROWS[op] = row


def _extend(ops: str, **columns: object) -> None:
    """Sets columns that many rows share."""
    for op in ops.split():
        ROWS[op] = replace(ROWS[op], **columns)  # type: ignore[arg-type]


# Weighted ops.
for _n in "123":
    _add(f"conv{_n}d", OpRow(f"conv{_n}d", COMPUTE, family="conv", inputs=(0,), weights=(1,), bias=2, fresh=True,
                             weight_axes=out_in, product=Product.CONV, scaling=Scaling.WEIGHTED))
    _add(f"conv_transpose{_n}d", OpRow(f"conv_transpose{_n}d", COMPUTE, family="conv_transpose", inputs=(0,),
                                       weights=(1,), bias=2, fresh=True, weight_axes=in_out,
                                       product=Product.CONV_TRANSPOSE, scaling=Scaling.WEIGHTED))
_add("linear", OpRow("linear", COMPUTE, inputs=(0,), weights=(1,), bias=2, fresh=True, weight_axes=out_in,
                     product=Product.OUT_IN, scaling=Scaling.WEIGHTED))
_add("matmul mm bmm mv dot linalg_vecdot", OpRow("matmul", COMPUTE, inputs=(0, 1), weights=(0, 1), fresh=True,
                                                 weight_axes=factor, product=Product.IN_OUT,
                                                 scaling=Scaling.WEIGHTED, tokens=Tokens.MULTIPLIED))
_add("addmm baddbmm", OpRow("addmm", COMPUTE, family="matmul", inputs=(1, 2), weights=(1, 2), data_arg=1, bias=0,
                            weight_axes=factor, product=Product.IN_OUT, scaling=Scaling.WEIGHTED,
                            tokens=Tokens.MULTIPLIED))
_add("_grouped_mm transformers::grouped_mm_fallback",  # [tokens, in], [experts, in, out], ends of the groups
     OpRow("grouped_matmul", COMPUTE, family="matmul", inputs=(0, 1), weights=(0, 1), weight_axes=stacked_in_out))
_add("einsum", OpRow("einsum", COMPUTE, family="matmul", inputs=(1,), weights=(1,), data_arg=None,
                     weight_axes=einsum_operand))
_add("bilinear", OpRow("bilinear", COMPUTE, inputs=(0, 1), weights=(2,), bias=3, weight_axes=out_in))
_add("embedding embedding_bag", OpRow("embedding", COMPUTE, inputs=(), weights=(0,), data_arg=None, weight_axes=out_in,
                        scaling=Scaling.COLUMNS, tokens=Tokens.LOOKED_UP))
_add("torchvision::deform_conv2d", OpRow("deform_conv2d", COMPUTE, family="conv", inputs=(0,), weights=(1,), bias=4,
                                         weight_axes=out_in))
_add("scaled_dot_product_attention", OpRow("attention", COMPUTE, inputs=(0, 1, 2), inside="attention_core",
                                             scaling=Scaling.ATTENTION, tokens=Tokens.QUERIES))

# Normalizations: scale and shift are parameters of the op.
_add("batch_norm _native_batch_norm_legit_no_training", OpRow("batch_norm", COMPUTE, inputs=(0,), weights=(1,), bias=2,
                                                              fresh=True, scaling=Scaling.CHANNEL_NORM))
_add("qtk::scale_shift", OpRow("scale_shift", COMPUTE, family="batch_norm", inputs=(0,), fresh=True,
                               scaling=Scaling.SCALE_SHIFT))
_add("instance_norm", OpRow("instance_norm", COMPUTE, inputs=(0,), weights=(1,), bias=2, fresh=True,
                            scaling=Scaling.CHANNEL_NORM))
_add("layer_norm native_layer_norm", OpRow("layer_norm", COMPUTE, inputs=(0,), weights=(2,), bias=3, fresh=True,
                                           scaling=Scaling.TRAILING_NORM))
_add("group_norm", OpRow("group_norm", COMPUTE, inputs=(0,), weights=(2,), bias=3, fresh=True,
                         scaling=Scaling.CHANNEL_NORM))
_add("rms_norm", OpRow("rms_norm", COMPUTE, inputs=(0,), weights=(2,), scaling=Scaling.TRAILING_NORM))

# Functions of one tensor.
for _kind in "relu leaky_relu".split():
    _add(_kind, OpRow(_kind, COMPUTE, inputs=(0,), activation=True, scaling=Scaling.KEPT, rectifier=True))
for _kind in "relu6 hardtanh".split():
    _add(_kind, OpRow(_kind, COMPUTE, inputs=(0,), activation=True, scaling=Scaling.CLAMPED))
for _kind in "hardswish hardsigmoid silu gelu elu selu celu mish sigmoid tanh softplus".split():
    _add(_kind, OpRow(_kind, COMPUTE, inputs=(0,), activation=True))
_add("clamp clamp_min clamp_max clip", OpRow("clamp", COMPUTE, inputs=(0,), activation=True, scaling=Scaling.CLAMPED))
_add("qtk::channel_scale", OpRow("channel_scale", COMPUTE, inputs=(0,), fresh=True, scaling=Scaling.KEPT))
_add("qtk::channel_clamp", OpRow("channel_clamp", COMPUTE, inputs=(0,), scaling=Scaling.CLAMPED))
_add("qtk::scan", OpRow("scan", COMPUTE, inputs=()))
_add("prelu _prelu_kernel", OpRow("prelu", COMPUTE, inputs=(0,), weights=(1,), weight_axes=one_per_channel,
                                  scaling=Scaling.KEPT, rectifier=True))
_add("softmax _softmax special_softmax", OpRow("softmax", COMPUTE, inputs=(0,), mask=Mask.READS,
                                               feeding=Feeding.ORDER))
_add("log_softmax _log_softmax", OpRow("log_softmax", COMPUTE, inputs=(0,), mask=Mask.READS | Mask.MAKES,
                                       feeding=Feeding.ORDER))
_add("rrelu rrelu_with_noise", OpRow("rrelu", COMPUTE, inputs=(0,), scaling=Scaling.KEPT))
for _kind in "threshold glu log_sigmoid hardshrink softshrink".split():
    _add(_kind, OpRow(_kind, COMPUTE, inputs=(0,)))
_add("logsumexp", OpRow("logsumexp", COMPUTE, inputs=(0,), mask=Mask.READS, tokens=Tokens.REDUCED))
for _kind in ("roi_align", "ps_roi_align", "ps_roi_pool"):
    _add(f"torchvision::{_kind}", OpRow(_kind, COMPUTE, inputs=(0,)))

# Arithmetic on tensors.
_add("add", OpRow("add", COMPUTE, fresh=True, arithmetic=True, scaling=Scaling.ADDED))
_add("sub subtract", OpRow("sub", COMPUTE, fresh=True, arithmetic=True, scaling=Scaling.ADDED))
_add("mul multiply", OpRow("mul", COMPUTE, fresh=True, arithmetic=True, scaling=Scaling.MULTIPLIED))
_add("div true_divide divide", OpRow("div", COMPUTE, divisors=(1,), arithmetic=True, scaling=Scaling.DIVIDED))
_add("reciprocal", OpRow("reciprocal", COMPUTE, divisors=(0,), arithmetic=True))
_add("rsqrt", OpRow("rsqrt", COMPUTE, family="root", divisors=(0,), arithmetic=True))
_add("rsub", OpRow("rsub", COMPUTE, arithmetic=True, scaling=Scaling.ADDED))
_add("neg", OpRow("neg", COMPUTE, arithmetic=True, scaling=Scaling.KEPT))
_add("sqrt", OpRow("sqrt", COMPUTE, family="root", arithmetic=True))
_add("pow", OpRow("pow", COMPUTE, arithmetic=True))
_add("maximum max.other", OpRow("maximum", COMPUTE, scaling=Scaling.ADDED))
_add("minimum min.other", OpRow("minimum", COMPUTE, scaling=Scaling.ADDED))
_add("abs", OpRow("abs", COMPUTE, scaling=Scaling.KEPT))
for _kind in ("mean", "sum"):
    _add(_kind, OpRow(_kind, COMPUTE, scaling=Scaling.REDUCED))
for _kind in ("floor_divide fmod remainder atan2 hypot addcmul addcdiv lerp "
              "exp expm1 exp2 square sin cos tan asin acos atan sinh cosh acosh atanh "
              "erf erfc erfinv floor ceil round trunc frac sign norm linalg_vector_norm prod cumsum cumprod "
              "var std var_mean std_mean grid_sampler grid_sampler_2d nan_to_num "
              "cosine_similarity _weight_norm special_erf outer cross kron cdist im2col col2im").split():
    _add(_kind, OpRow(_kind, COMPUTE))
for _kind in "log log10 log1p log2 logit asinh xlogy".split():
    _add(_kind, OpRow(_kind, COMPUTE, family="logarithm"))
_add("adaptive_avg_pool2d", OpRow("adaptive_avg_pool2d", COMPUTE, family="avg_pool", fresh=True,
                                  scaling=Scaling.WINDOWED))
for _kind in "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool3d".split():
    _add(_kind, OpRow(_kind, COMPUTE, family="avg_pool", scaling=Scaling.WINDOWED))
for _kind in ("upsample_bilinear2d upsample_linear1d upsample_trilinear3d upsample_bicubic2d "
              "_upsample_bilinear2d_aa _upsample_bicubic2d_aa").split():
    _add(_kind, OpRow(_kind, COMPUTE, family="interpolate", scaling=Scaling.WINDOWED))

# Data movement: elements keep their values and change their positions; also ops that select some of them.
_MOVEMENTS: tuple[tuple[str, InputAxis | None, str], ...] = (
    ("reshape", reshaped_axis, "view reshape _unsafe_view flatten unflatten view_as reshape_as view_copy "
                               "_reshape_alias ravel"),
    ("squeeze", reshaped_axis, "squeeze unsqueeze"),
    ("transpose", permuted_axis, "transpose permute t numpy_T mT movedim swapaxes moveaxis adjoint"),
    ("slice", same_axis_of_equal_rank, "slice select narrow diagonal as_strided unfold"),
    ("split", same_axis_of_equal_rank, "split split_with_sizes chunk unbind tensor_split unsafe_split unsafe_chunk "
                                       "unsafe_split_with_sizes"),
    ("expand", unexpanded_axis, "expand expand_as broadcast_to repeat tile repeat_interleave"),
    ("identity", same_axis, "clone contiguous alias detach lift_fresh_copy lift_fresh _to_copy to type_as positive"),
    ("dropout", same_axis, "dropout feature_dropout alpha_dropout feature_alpha_dropout"),
    ("roll", same_axis, "roll flip rot90"),
    ("triangle", same_axis, "tril triu"),
    ("gather", selected_axis, "index index_select"),
    ("gather", None, "gather take take_along_dim masked_select"),
    ("max_pool", None, "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices "
                       "max_pool1d_with_indices adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"),
    ("roi_pool", None, "torchvision::roi_pool"),
    ("pixel_shuffle", None, "pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle"),
    ("nearest", None, "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d "
                      "_upsample_nearest_exact1d _upsample_nearest_exact3d"),
    ("pick", None, "max min max.default max.dim min.default min.dim amax amin sort median kthvalue cummax cummin"),
    ("pad", None, "constant_pad_nd pad reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
                  "replication_pad2d replication_pad3d _pad_circular _pad_packed_sequence"),
    ("meshgrid", None, "meshgrid"),
    ("pack", None, "qtk::pack_padded"),
)
_MOVEMENT_TOKENS = {
    "reshape": Tokens.RESHAPED, "squeeze": Tokens.RESHAPED, "transpose": Tokens.PERMUTED, "roll": Tokens.REORDERED,
    "gather": Tokens.REORDERED, "pick": Tokens.REORDERED,
}
_MOVEMENT_SCALING = {
    "identity": Scaling.KEPT, "dropout": Scaling.KEPT, "max_pool": Scaling.WINDOWED, "nearest": Scaling.WINDOWED,
    "pick": Scaling.REDUCED, "roi_pool": Scaling.PINNED,
}
for _kind, _input_axis, _ops in _MOVEMENTS:
    _add(_ops, OpRow(_kind, MOVEMENT, inputs=(0,), input_axis=_input_axis, scaling=_MOVEMENT_SCALING.get(_kind),
                     tokens=_MOVEMENT_TOKENS.get(_kind, Tokens.ELEMENTWISE),
                     mask=Mask.READS if _kind == "pick" else Mask.NONE))
_add("topk", OpRow("topk", MOVEMENT, family="pick", inputs=(0,), scaling=Scaling.REDUCED, tokens=Tokens.REORDERED,
                   mask=Mask.READS, feeding=Feeding.LARGEST))
ROWS["as_strided"] = replace(ROWS["as_strided"], scaling=Scaling.PINNED)  # it reads the layout of memory
_add("masked_fill", OpRow("masked_fill", MOVEMENT, inputs=(0,), input_axis=same_axis, mask=Mask.MAKES))

# Merges: one encoding over all inputs and the output.
_add("cat concat concatenate hstack vstack", OpRow("concat", MERGE, inputs=(0,), fresh=True))
_add("stack", OpRow("stack", MERGE, inputs=(0,)))
_add("where", OpRow("where", MERGE, inputs=(1, 2), mask=Mask.MAKES, scaling=Scaling.ADDED))
_add("slice_scatter select_scatter diagonal_scatter", OpRow("scatter", MERGE, inputs=(0, 1)))
_add("scatter scatter_add index_add index_copy scatter_reduce", OpRow("scatter_index", MERGE, family="scatter",
                                                                      inputs=(0, 3), scaling=Scaling.PINNED))
_add("index_put masked_scatter", OpRow("index_put", MERGE, family="scatter", inputs=(0, 2),
                                         scaling=Scaling.PINNED))

# Counts.
_add("histc bincount", OpRow("count", COUNT, inputs=()))
for _kind in ("argmax", "argmin"):
    _add(_kind, OpRow(_kind, COUNT, inputs=(), mask=Mask.READS, tokens=Tokens.REDUCED))
for _kind in ("all", "any"):
    _add(_kind, OpRow(_kind, COUNT, inputs=(), tokens=Tokens.REDUCED))

# Constants.
_add("full scalar_tensor", OpRow("constant", CREATE, inputs=(), arithmetic=True))
_add("arange tril_indices triu_indices", OpRow("constant", CREATE, inputs=()))
_add("zeros ones empty linspace eye zeros_like ones_like full_like empty_like new_zeros new_ones new_full "
     "new_empty fill zero", OpRow("constant", CREATE, inputs=()))

# Columns that rows of several roles share.
_extend("add sub subtract rsub mul multiply div true_divide divide neg abs sign floor_divide remainder fmod floor ceil "
        "round trunc sum cumsum prod cumprod mean maximum max.other minimum min.other clamp clamp_min clamp_max clip",
        counts=True)
_extend("add sub subtract rsub mul multiply div true_divide divide neg maximum max.other minimum min.other clamp "
        "clamp_min clamp_max clip", mask=Mask.KEEPS)
_extend("log logit", mask=Mask.MAKES)
_extend("add sub subtract sum mean adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d "
        "avg_pool3d clamp clamp_min clamp_max clip maximum max.other abs", feeding=Feeding.RESULT)
_extend("lerp cumsum rsub", feeding=Feeding.RESULT)
_extend("addcmul", feeding=Feeding.ADDED)
_extend("mul multiply div true_divide divide", feeding=Feeding.SCALED)
_extend("sqrt rsqrt log log10 log1p log2 logit asinh xlogy", feeding=Feeding.RELATIVE)
_extend("sigmoid", feeding=Feeding.ORDER)
_extend("acos asin acosh atanh sqrt hypot log log10 log1p log2 logit xlogy", edged=True)
_extend("sin cos tan floor ceil round trunc frac remainder fmod floor_divide", precision=Precision.FRACTION)
_extend("add sub subtract rsub mul multiply div true_divide divide neg", precision=Precision.ABSOLUTE)
_extend("exp exp2 expm1 sinh cosh", precision=Precision.EXPONENT)
_extend("mean sum amax amin prod var std norm linalg_vector_norm median max.default max.dim min.default min.dim",
        tokens=Tokens.REDUCED)
_extend("select unbind", tokens=Tokens.SELECTED)

IDENTITY, SPLIT, DROPOUT, INDICES = ROWS["clone"], ROWS["split"], ROWS["dropout"], ROWS["arange"]
"""Rows that other modules compare with: copies, ops that split an axis into several results, dropout of any kind, ops
that number elements."""

# Modules with graphs inside, called as qtk.nn defines them: (x, states, weights, biases).
RECURRENT = {
    kind: OpRow(kind, COMPUTE, family="recurrent", inputs=(0, 1), weights=(2,), bias=3, weight_axes=out_in,
                product=Product.OUT_IN, inside=f"{kind}_cell")
    for kind in ("lstm", "gru", "rnn")
}

SCAN = ROWS["qtk::scan"]
"""A recurrence in the code of the model, which is in float inside, with all that it reads."""

CHANNEL_SCALE = ROWS["qtk::channel_scale"]
"""Reads its input in front of the quantizer of that; only the product is quantized."""

PYTHON = "python"
"""The name by which rules match what the Python between captured graphs makes, and what it reads."""

ACCUMULATOR = "accumulator"
"""The name by which rules match a state that is in the sum which becomes its next value, and what is summed with it."""

OP_NAMES = frozenset(
    name for row in (*ROWS.values(), *RECURRENT.values()) for name in (*row.names, row.inside) if name is not None
) | {"input", "output", ACCUMULATOR, PYTHON}
"""Every name of an op that a config rule may use, but of formulas; ``output`` is fed, and no op that a rule matches."""
