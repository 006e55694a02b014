import pytest
import torch

from qtk.core.dtypes import INT32, dtype
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError
from qtk.quantizers.bias_quantizer import BiasQuantizer
from qtk.quantizers.modes import in_mode, read_encodings
from qtk.quantizers.quantizer import Mode, Quantizer
from tests.pretend_gpu import pretended_gpu, to_gpu


def test_each_quantizer_returns_to_its_own_mode_even_after_an_error():
    quantizers = [Quantizer(QuantSpec(dtype("int8")), site=f"q{i}") for i in range(2)]
    quantizers[0].mode = Mode.SIMULATE
    with in_mode(iter(quantizers), Mode.OBSERVE):
        assert [quantizer.mode for quantizer in quantizers] == [Mode.OBSERVE, Mode.OBSERVE]
    with pytest.raises(ZeroDivisionError), in_mode(quantizers, Mode.BYPASS):
        raise ZeroDivisionError
    assert [quantizer.mode for quantizer in quantizers] == [Mode.SIMULATE, Mode.BYPASS]


ASYMMETRIC, SYMMETRIC = QuantSpec(dtype("uint8")), QuantSpec(dtype("int8"), symmetric=True)


def quantizers():
    fixed, learned, weight, lost = (Quantizer(spec, site=f"{index}") for index, spec in enumerate(
        (ASYMMETRIC, ASYMMETRIC, SYMMETRIC, SYMMETRIC)))
    for each in (fixed, learned):
        each.load_encoding(Encoding(ASYMMETRIC, torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32)))
    learned.learn_range()
    learned.scale_factor.data.fill_(1.3)
    learned.zero_point_shift.data.fill_(0.1)
    for each in (weight, lost):
        each.load_encoding(Encoding(SYMMETRIC, torch.tensor([0.3])))
    lost.scale.fill_(-1.0)
    bias = BiasQuantizer(QuantSpec(INT32, symmetric=True), fixed, weight, site="bias")
    return [fixed, learned, weight, lost, bias, Quantizer(SYMMETRIC, site="new")]


def test_they_are_those_of_the_quantizers():
    given = quantizers()
    found = read_encodings(given)
    for quantizer, encoding in zip(given, found, strict=True):
        if quantizer.site == "3":
            assert isinstance(encoding, EncodingError)
            with pytest.raises(EncodingError) as raised:
                _ = quantizer.encoding
            assert str(encoding) == str(raised.value)
        elif quantizer.site == "new":
            assert encoding is None
        else:
            assert encoding.equals(quantizer.encoding)


def test_a_gpu_is_waited_for_once(monkeypatch):
    pytest.importorskip("triton")
    given = quantizers()
    expected = read_encodings(given)
    with pretended_gpu(monkeypatch) as gpu:
        for quantizer in given:
            to_gpu(quantizer)
        found = read_encodings(given)
        assert len(gpu.waits) == 1
    for encoding, other in zip(found, expected, strict=True):
        assert encoding.equals(other) if isinstance(other, Encoding) else type(encoding) is type(other)
