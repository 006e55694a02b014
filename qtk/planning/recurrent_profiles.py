"""How the values inside a recurrent cell are quantized where the config does not say.

``int16_state`` computes as the integer LSTMs of runtimes do: the sums in front of the gates in 16 bits on [-8, 8),
beyond which sigmoid and tanh are flat, the products that are summed not rounded by themselves, and the cell state,
which is rounded at every step, in 16 bits; gates and hidden state as other activations. So does TensorFlow Lite
(lite/kernels/lstm_eval.cc: sums in Q3.12, the cell state in int16 with a scale that is a power of two), and QNN's Lstm.
``int8`` quantizes every value in the same way.
``dynamic`` computes as ONNX Runtime's kernel DynamicQuantizeLSTM: weights of 8 bits; the input of all time steps, and
the hidden state of each, quantized to uint8 with ranges of their own at run time; sums, gates and cell state in float.
There is no such kernel for other nets, projected states, packed sequences and other widths: these compute in float.
"""

from __future__ import annotations

import glob
import re
from typing import Literal, TypeAlias

from torch import fx

from qtk.config.schema import Match, Rule
from qtk.config.tensor_setting import TensorSetting
from qtk.core.dtypes import FloatDtype, dtype
from qtk.graph.sites import COMPOSITE, OWNER, label
from qtk.nn.recurrent_cells import CELL_STATES, PARTIAL_PRODUCTS, SUMS
from qtk.operators.op_table import RECURRENT
from qtk.planning.decision import Decision

Profile: TypeAlias = Literal["int8", "int16_state", "float", "dynamic"]

DEFAULT: Profile = "int16_state"

SUM = TensorSetting(bits=16, range=(-8.0, 8.0 - 2.0**-12))
STATE = TensorSetting(bits=16)
DYNAMIC = TensorSetting(bits=8, symmetric=False, granularity="per_tensor", dynamic=True, narrow_range=False)
CELLS = frozenset(str(row.inside) for row in RECURRENT.values())


def profiled(decision: Decision, node: fx.Node, profile: Profile, *, is_cell_state: bool) -> Decision:
    """The decision for the value of ``node``, of an op inside a cell or of what is read as its cell state."""
    setting = _setting(node, is_cell_state=is_cell_state) if profile == "int16_state" else None
    if setting is None or not decision.enabled or decision.setting.is_dynamic or _is_float_format(decision.setting):
        return decision
    return decision.overlaid(setting, profile)


def float_step(path: str) -> Rule:
    """The rule that computes a layer of a recurrent net in float, in one direction.

    >>> float_step("lstm.l0_reverse").match.path
    ('lstm.l0_reverse',)
    """
    return Rule(match=Match(path=(glob.escape(re.sub(r"@\d+", "", path)),)), inside="float", optional=True)


def _setting(node: fx.Node, *, is_cell_state: bool) -> TensorSetting | Literal["float"] | None:
    if is_cell_state:
        return STATE
    name = (label(node, OWNER) or "").rpartition(".")[2] if label(node, COMPOSITE) in CELLS else ""
    if name in PARTIAL_PRODUCTS:
        return "float"
    return SUM if name in SUMS else STATE if name in CELL_STATES else None


def _is_float_format(setting: TensorSetting) -> bool:
    return setting.in_blocks or (setting.dtype is not None and isinstance(dtype(setting.dtype), FloatDtype))
