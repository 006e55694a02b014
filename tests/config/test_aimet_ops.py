"""The table of op types."""

from qtk.config.aimet_ops import IMPLIED_BOUNDS, OP_KINDS
from qtk.operators.op_table import OP_NAMES


def test_every_kind_is_one_the_op_table_knows():
    assert {kind for kinds in OP_KINDS.values() for kind in kinds} <= OP_NAMES


def test_bounds_are_those_of_known_op_types():
    assert IMPLIED_BOUNDS.keys() <= OP_KINDS.keys()
