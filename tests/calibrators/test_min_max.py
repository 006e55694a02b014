import pytest
import torch

from qtk.calibrators.min_max import MinMax
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError

SPECS = [
    QuantSpec(dtype("int8"), PerTensor(), symmetric=True),
    QuantSpec(dtype("uint8"), PerTensor()),
    QuantSpec(dtype("int4"), PerChannel(0), symmetric=True, narrow_range=True),
    QuantSpec(dtype("int16"), PerBlock((1, 4))),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_range_seen_just_fits(spec):
    x = torch.randn(3, 8)
    calibrator = MinMax()
    observer = calibrator.observer(spec.granularity)
    for half in x.chunk(2, 1) if spec.granularity == PerTensor() else (x,):
        observer.observe(half)
    encoding = calibrator.encodings([observer], [spec])[0]
    assert encoding.spec == spec
    groups = {PerTensor(): x.reshape(1, -1), PerChannel(0): x, PerBlock((1, 4)): x.reshape(6, 4)}[spec.granularity]
    low, high = groups.amin(1).clamp(max=0).double(), groups.amax(1).clamp(min=0).double()
    step = torch.maximum(high / spec.qmax, low / spec.qmin)
    if not spec.symmetric:
        step = (high - low) / (spec.qmax - spec.qmin)
    torch.testing.assert_close(encoding.scale.flatten().double(), step, rtol=1e-6, atol=0)


def test_a_site_has_the_encoding_that_it_has_alone():
    specs = [*SPECS, SPECS[0], QuantSpec(dtype("fp4_e2m1"), PerTensor(), symmetric=True), SPECS[1], SPECS[1]]
    calibrator, observers = MinMax(), []
    for index, spec in enumerate(specs):
        observers.append(calibrator.observer(spec.granularity))
        observers[-1].observe(torch.randn(3, 8) * (index + 1))
    together = calibrator.encodings(observers, specs)
    for encoding, observer, spec in zip(together, observers, specs, strict=True):
        assert encoding.equals(calibrator.encodings([observer], [spec])[0])
        assert encoding.scale.shape == spec.granularity.qparam_shape((3, 8))


def test_no_data_is_an_error():
    calibrator = MinMax()
    observer = calibrator.observer(PerTensor())
    for nothing in (torch.empty(0), torch.full((2,), -torch.inf)):
        observer.observe(nothing)
        with pytest.raises(CalibrationError, match="no data was observed"):
            calibrator.encodings([observer], [SPECS[1]])


def test_a_channel_without_data_is_an_error_with_its_place():
    calibrator = MinMax()
    whole, observer = (calibrator.observer(PerChannel(0)) for _ in range(2))
    whole.observe(torch.ones(5, 1))
    observer.observe(torch.tensor([[1.0], [-torch.inf], [2.0]]))
    with pytest.raises(CalibrationError, match=r"1 of 3 scales.*\(1,\)"):
        calibrator.encodings([whole, observer], [SPECS[2], SPECS[2]])
