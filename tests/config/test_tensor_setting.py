import pytest
from pydantic import ValidationError

from qtk.config.tensor_setting import TensorSetting
from qtk.core.dtypes import BITS, dtype


@pytest.mark.parametrize("bits", BITS)
def test_agreeing_bits_and_dtype_are_no_contradiction(bits):
    assert TensorSetting(bits=bits, dtype=f"int{bits}").bits == dtype(f"int{bits}").bits


@pytest.mark.parametrize(
    ("below", "above", "expected"),
    [
        ({"bits": 8, "symmetric": True}, {"bits": 4}, {"bits": 4, "symmetric": True}),
        ({"dtype": "int8", "symmetric": True}, {"bits": 4}, {"bits": 4, "symmetric": True}),
        ({"bits": 8, "narrow_range": True}, {"dtype": "uint4"}, {"dtype": "uint4", "narrow_range": True}),
        ({"bits": 8}, {"symmetric": False}, {"bits": 8, "symmetric": False}),
        ({"symmetric": True}, {"symmetric": False}, {"symmetric": False}),
        ({"granularity": "per_block", "block_size": 32}, {"granularity": "per_channel"},
         {"granularity": "per_channel"}),
        ({"granularity": "per_block", "block_size": 32, "remainder": "float"}, {"granularity": "per_channel"},
         {"granularity": "per_channel"}),
        ({"granularity": "per_block", "block_size": 32}, {"bits": 4},
         {"granularity": "per_block", "block_size": 32, "bits": 4}),
        ({"range": (0.0, 1.0)}, {"range": (-1.0, 1.0)}, {"range": (-1.0, 1.0)}),
        ({"range": (0.0, 1.0), "min_fill": 0.25}, {"range": (0.0, 1.0)}, {"range": (0.0, 1.0)}),
        ({"range": (0.0, 1.0), "min_fill": 0.25}, {"bounds": (0.0, None)}, {"bounds": (0.0, None)}),
        ({"scheme": "mse"}, {}, {"scheme": "mse"}),
    ],
)
def test_overlaying_replaces_what_the_later_setting_gives_and_what_it_contradicts(below, above, expected):
    lower, upper = TensorSetting(**below), TensorSetting(**above)
    assert lower.overlaid(upper) == TensorSetting(**expected)
    assert lower == TensorSetting(**below)


def test_overlaying_formats_in_blocks():
    channel, mx = TensorSetting(bits=8, granularity="per_channel"), TensorSetting(dtype="mxfp4")
    assert channel.overlaid(mx) == mx
    assert TensorSetting(bits=8, granularity="per_block", block_size=64).overlaid(mx) == mx
    assert mx.overlaid(TensorSetting(granularity="per_channel")) == TensorSetting(
        dtype="fp4_e2m1", granularity="per_channel"
    )
    assert mx.overlaid(TensorSetting(bits=4)) == TensorSetting(bits=4)


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ({"dtype": "uint8", "reduced_range": True}, "reduced_range needs dtype: int8, got dtype: uint8"),
        ({"bits": 4, "reduced_range": True}, "reduced_range needs bits: 8, got bits: 4"),
        ({"block_size": 32}, "needs granularity per_block"),
        ({"remainder": "float"}, "remainder float needs granularity per_block"),
        ({"granularity": "per_block"}, "needs a block_size"),
        ({"dynamic": True, "granularity": "per_channel"}, "per_tensor, per_token or per_block"),
        ({"dynamic": False, "granularity": "per_token"}, "leave one out"),
        ({"granularity": "per_token", "scheme": "mse"}, "needs no scheme"),
        ({"range": (1.0, 0.0)}, "low < high"),
        ({"range": (0.0, 1.0), "bounds": (0.0, None)}, "leave one out"),
        ({"min_fill": 0.25}, "min_fill 0.25 is a share of a range"),
    ],
)
def test_each_contradiction_is_refused(setting, rule):
    with pytest.raises(ValidationError, match=rule):
        TensorSetting(**setting)
