"""What each ATen op does to the values that pass through it. To add an operator, add a row.

The op's *role* decides where quantizers go (DESIGN §2.3): compute ops make new values, movement ops carry the
encoding of their input through, merges share one encoding over inputs and output, creations make constants.
An op without a row neither receives nor passes an encoding, and the report names it.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from qtk.nn.attention import Attention
from qtk.nn.batch_norm import BatchNorm
from qtk.nn.dropout import Dropout
from qtk.nn.instance_norm import InstanceNorm
from qtk.nn.recurrent import Recurrent, RecurrentCell
from qtk.torch_private import schema_of


class Role(enum.Enum):
    """What an op does with values."""

    COMPUTE = "compute"
    MOVEMENT = "movement"
    MERGE = "merge"
    CREATE = "create"


WeightAxes = Callable[[fx.Node, fx.Node], tuple[int, int] | None]
"""(the op, the node that is its weight) → the weight's axes of output and of input channels, if it has such."""


@dataclass(frozen=True, slots=True)
class OpRow:
    """One operator.

    Args:
        kind: the name config rules use (``conv2d``).
        family: a wider name that rules may use as well (``conv``); equals ``kind`` for most.
        role: see ``Role``.
        inputs: argument positions that carry values; ``None``: every tensor argument.
        weights: argument positions that hold a weight when their value is made from parameters alone.
        weight_axes: finds the axes of such a weight; ``None``: it has no output channels and gets one scale.
        bias: argument position of the bias.
        divisors: argument positions at which a 0 makes the result infinite.
    """

    kind: str
    family: str
    role: Role
    inputs: tuple[int, ...] | None = None
    weights: tuple[int, ...] = ()
    weight_axes: WeightAxes | None = None
    bias: int | None = None
    divisors: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, str]:
        return (self.kind, self.family)


def _out_in(op: fx.Node, weight: fx.Node) -> tuple[int, int] | None:
    return 0, 1


def _in_out(op: fx.Node, weight: fx.Node) -> tuple[int, int] | None:
    return 1, 0


def _vector(op: fx.Node, weight: fx.Node) -> tuple[int, int] | None:
    """One number a channel: the only axis is both."""
    return (0, 0) if weight.meta["val"].ndim == 1 else None


def _matmul(op: fx.Node, weight: fx.Node) -> tuple[int, int] | None:
    """A right factor is ``[…, in, out]``, a left one ``[…, out, in]``; a vector has no output channel."""
    rank = weight.meta["val"].ndim
    if rank < 2:
        return None
    *_, left, right = (arg for arg in op.args if isinstance(arg, fx.Node))
    return (rank - 2, rank - 1) if weight is left and weight is not right else (rank - 1, rank - 2)


def _einsum(op: fx.Node, weight: fx.Node) -> tuple[int, int] | None:
    """Out: the first index of the weight that the output keeps and no other operand has; in: the first it sums."""
    equation, operands = op.args[0], op.args[1]
    assert isinstance(equation, str)
    assert isinstance(operands, (list, tuple))
    terms, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow or "." in equation:
        return None
    own, *others = sorted(zip(terms.split(","), operands, strict=True), key=lambda pair: pair[1] is not weight)
    kept = [axis for axis, index in enumerate(own[0]) if index in output and not any(index in o for o, _ in others)]
    summed = [axis for axis, index in enumerate(own[0]) if index not in output]
    return (kept[0], summed[0]) if kept and summed else None


ROWS: dict[str, OpRow] = {}


def _row(kind: str, ops: str, role: Role, *, family: str | None = None, inputs: tuple[int, ...] | None = None,
         weights: tuple[int, ...] = (), weight_axes: WeightAxes | None = None, bias: int | None = None,
         divisors: tuple[int, ...] = ()) -> None:
    row = OpRow(kind, family or kind, role, inputs, weights, weight_axes, bias, divisors)
    for op in ops.split():
        assert ROWS.get(op) is None, f"op {op} has two rows"
        ROWS[op] = row


# Weighted ops: argument 1 is the weight, 2 the bias.
for _n in "123":
    _row(f"conv{_n}d", f"conv{_n}d", Role.COMPUTE, family="conv", inputs=(0,), weights=(1,), weight_axes=_out_in,
         bias=2)
    _row(f"conv_transpose{_n}d", f"conv_transpose{_n}d", Role.COMPUTE, family="conv_transpose", inputs=(0,),
         weights=(1,), weight_axes=_in_out, bias=2)
_row("linear", "linear", Role.COMPUTE, inputs=(0,), weights=(1,), weight_axes=_out_in, bias=2)
_row("bilinear", "bilinear", Role.COMPUTE, inputs=(0, 1), weights=(2,), weight_axes=_out_in, bias=3)
_row("matmul", "matmul mm bmm mv dot linalg_vecdot", Role.COMPUTE, inputs=(0, 1), weights=(0, 1), weight_axes=_matmul)
_row("addmm", "addmm baddbmm", Role.COMPUTE, family="matmul", inputs=(1, 2), weights=(1, 2), weight_axes=_matmul,
     bias=0)
_row("einsum", "einsum", Role.COMPUTE, family="matmul", inputs=(1,), weights=(1,), weight_axes=_einsum)
_row("embedding", "embedding", Role.COMPUTE, inputs=(), weights=(0,), weight_axes=_out_in)
_row("attention", "scaled_dot_product_attention", Role.COMPUTE, inputs=(0, 1, 2))

_row("deform_conv2d", "torchvision::deform_conv2d", Role.COMPUTE, family="conv", inputs=(0,), weights=(1,),
     weight_axes=_out_in, bias=4)

# Normalizations: scale and shift are parameters of the op.
_row("batch_norm", "batch_norm _native_batch_norm_legit_no_training", Role.COMPUTE, inputs=(0,), weights=(1,), bias=2)
_row("instance_norm", "instance_norm", Role.COMPUTE, inputs=(0,), weights=(1,), bias=2)
_row("layer_norm", "layer_norm native_layer_norm", Role.COMPUTE, inputs=(0,), weights=(2,), bias=3)
_row("group_norm", "group_norm", Role.COMPUTE, inputs=(0,), weights=(2,), bias=3)
_row("rms_norm", "rms_norm", Role.COMPUTE, inputs=(0,), weights=(2,))

# Activations.
for _kind in ("relu relu6 hardtanh hardswish hardsigmoid silu gelu elu selu celu leaky_relu mish sigmoid tanh softplus "
              "threshold glu log_sigmoid rrelu hardshrink softshrink softmax log_softmax "
              "logsumexp").split():
    _row(_kind, {"softmax": "softmax _softmax special_softmax", "log_softmax": "log_softmax _log_softmax",
                 "rrelu": "rrelu rrelu_with_noise"}.get(_kind, _kind), Role.COMPUTE, inputs=(0,))
for _kind in ("roi_align", "ps_roi_align", "ps_roi_pool"):
    _row(_kind, f"torchvision::{_kind}", Role.COMPUTE, inputs=(0,))
_row("roi_pool", "torchvision::roi_pool", Role.MOVEMENT, inputs=(0,))
_row("prelu", "prelu _prelu_kernel", Role.COMPUTE, inputs=(0,), weights=(1,), weight_axes=_vector)
_row("clamp", "clamp clamp_min clamp_max clip", Role.COMPUTE, inputs=(0,))

# Arithmetic on tensors.
_row("maximum", "maximum max.other", Role.COMPUTE)
_row("minimum", "minimum min.other", Role.COMPUTE)
_row("div", "div true_divide", Role.COMPUTE, divisors=(1,))
for _kind in ("reciprocal", "rsqrt"):
    _row(_kind, _kind, Role.COMPUTE, divisors=(0,))
for _kind in ("sub rsub mul floor_divide pow fmod remainder atan2 hypot addcmul addcdiv lerp").split():
    _row(_kind, _kind, Role.COMPUTE)
_row("add", "add", Role.COMPUTE)
for _kind in ("neg abs exp expm1 exp2 log log1p log2 sqrt square sin cos tan asin acos atan sinh cosh "
              "erf erfc erfinv floor ceil round trunc frac sign norm linalg_vector_norm mean sum prod cumsum cumprod "
              "var std var_mean std_mean avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
              "adaptive_avg_pool3d upsample_bilinear2d upsample_linear1d upsample_trilinear3d upsample_bicubic2d "
              "_upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler grid_sampler_2d nan_to_num "
              "cosine_similarity _weight_norm logit special_erf outer cross kron cdist im2col col2im").split():
    _family = ("avg_pool" if "avg_pool" in _kind else "interpolate" if "upsample" in _kind else
               "mean" if _kind == "mean" else _kind)
    _row(_kind, _kind, Role.COMPUTE, family=_family)

# Data movement: the numbers stay, their place changes; also ops that pick some of them.
for _kind, _ops in {
    "reshape": "view reshape _unsafe_view flatten unflatten view_as reshape_as view_copy _reshape_alias ravel",
    "transpose": "transpose permute t numpy_T mT movedim swapaxes moveaxis adjoint",
    "squeeze": "squeeze unsqueeze",
    "slice": "slice select narrow diagonal as_strided unfold",
    "split": "split split_with_sizes chunk unbind tensor_split unsafe_split unsafe_chunk unsafe_split_with_sizes",
    "gather": "gather index index_select take take_along_dim masked_select",
    "expand": "expand expand_as broadcast_to repeat tile repeat_interleave",
    "identity": "clone contiguous alias detach lift_fresh_copy lift_fresh _to_copy to type_as positive",
    "roll": "roll flip rot90",
    "max_pool": "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices "
                "max_pool1d_with_indices adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
    "pixel_shuffle": "pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle",
    "nearest": "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d "
               "_upsample_nearest_exact1d _upsample_nearest_exact3d",
    "pick": "max min amax amin topk sort median kthvalue cummax cummin",
    "pad": "constant_pad_nd pad reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
           "replication_pad2d replication_pad3d _pad_circular",
    "triangle": "tril triu",
    "masked_fill": "masked_fill",
}.items():
    _row(_kind, _ops, Role.MOVEMENT, inputs=(0,))
_row("dropout", "dropout", Role.MOVEMENT, inputs=(0,))

# Merges: one encoding over all inputs and the output.
_row("concat", "cat concat concatenate hstack vstack", Role.MERGE, inputs=(0,))
_row("stack", "stack", Role.MERGE, inputs=(0,))
_row("meshgrid", "meshgrid", Role.MOVEMENT, inputs=(0,))
_row("where", "where", Role.MERGE, inputs=(1, 2))
_row("scatter", "slice_scatter select_scatter diagonal_scatter", Role.MERGE, inputs=(0, 1))
_row("scatter_index", "scatter scatter_add index_add index_copy scatter_reduce", Role.MERGE, family="scatter",
     inputs=(0, 3))
_row("index_put", "index_put masked_scatter", Role.MERGE, family="scatter", inputs=(0, 2))

# Constants.
_row("constant", "zeros ones full empty arange linspace eye scalar_tensor zeros_like ones_like full_like empty_like "
     "new_zeros new_ones new_full new_empty fill zero tril_indices triu_indices", Role.CREATE, inputs=())

# Modules with graphs inside, called as qtk.nn defines them: (x, states, weights, biases).
RECURRENT = {
    kind: OpRow(kind, "recurrent", Role.COMPUTE, inputs=(0, 1), weights=(2,), weight_axes=_out_in, bias=3)
    for kind in ("lstm", "gru", "rnn")
}
INSIDE = {"lstm": "lstm_cell", "gru": "gru_cell", "rnn": "rnn_cell", "attention": "attention_core"}
"""Kind of an op → the name that config rules have for all that is computed inside it."""

OP_NAMES = (
    frozenset(name for row in (*ROWS.values(), *RECURRENT.values()) for name in row.names)
    | frozenset(INSIDE.values()) | {"input"}
)
"""Every op name a config rule may use."""


def op_name(node: fx.Node) -> str:
    """The op a node calls, for reports: ``aten.lstm.input``, or the module's class for a call_module."""
    if node.op == "call_module":
        return type(_module(node)).__name__
    return str(node.target)


def row_of(node: fx.Node) -> OpRow | None:
    """The row of the op that a node calls, ``None`` if the table does not know it or it is no op."""
    if node.op == "call_module":
        match _module(node):
            case BatchNorm():
                return ROWS["batch_norm"]
            case Dropout():
                return ROWS["dropout"]
            case InstanceNorm():
                return ROWS["instance_norm"]
            case Attention():
                return ROWS["scaled_dot_product_attention"]
            case Recurrent(kind=kind) | RecurrentCell(kind=kind):
                return RECURRENT[kind.partition("_")[0]]
        return None
    if node.op != "call_function":
        return None
    schema = schema_of(node.target)
    if schema is None:
        return GETITEM if node.target is operator.getitem else None
    name = schema.name.removeprefix("aten::")
    if name in ("constant_pad_nd", "pad") and _fill_value(node):
        return PAD_WITH_VALUE
    return ROWS.get(f"{name}.{schema.overload_name}") or ROWS.get(name)


GETITEM = OpRow("getitem", "getitem", Role.MOVEMENT, inputs=(0,))

PAD_WITH_VALUE = OpRow("pad", "pad", Role.COMPUTE, inputs=(0,))
"""Padding with a number other than 0 brings a value in that the input's encoding may not hold."""


def _fill_value(node: fx.Node) -> object:
    """The number a pad op fills with (0 when it copies values of its input)."""
    if "constant_pad_nd" in str(node.target):
        return node.args[2] if len(node.args) > 2 else 0
    return node.args[3] if len(node.args) > 3 and node.args[2] == "constant" else 0


def _module(node: fx.Node) -> object:
    owner = node.graph.owning_module
    assert owner is not None
    return owner.get_submodule(str(node.target))
