import torch

from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.layerwise.block_hooks import dropping, hooked, mixed, replacing
from qtk.quantizers.quantizer import Mode, Quantizer


def quantizer() -> Quantizer:
    made = Quantizer(QuantSpec(dtype("int4"), symmetric=True), site="x")
    made.load_encoding(Encoding(made.spec, torch.tensor([1.0])))
    made.mode = Mode.SIMULATE
    return made


def test_hooks_act_while_the_body_runs():
    first, x = quantizer(), torch.tensor([0.3, 1.2])
    with hooked({first: replacing(lambda: torch.tensor([5.0, 6.0], dtype=torch.float64))}):
        assert first(x).tolist() == [5.0, 6.0]
        assert first(x).dtype == x.dtype
    assert first(x).tolist() == [0.0, 1.0]


def test_so_many_values_are_left_as_they_are():
    first, x = quantizer(), torch.full((10_000,), 0.3)
    with hooked({first: dropping(lambda: 0.25)}):
        shown = first(x)
    assert abs(float((shown == x).double().mean()) - 0.25) < 0.02  # 5 standard deviations
    assert bool(((shown == x) | (shown == 0)).all())


def test_only_pairs_of_float_tensors_are_mixed():
    one, other = torch.zeros(4), torch.ones(4)
    assert mixed(one, other, 0.0) is other
    for own, value in ((3, 4), (one, torch.ones(5)), (one.long(), other.long())):
        assert mixed(own, value, 0.5) is value
