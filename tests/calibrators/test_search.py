"""Together or alone, whole or in portions, screened or not: the same encodings."""

import pytest
import torch

from qtk.calibrators import search
from qtk.calibrators.mse import Mse
from qtk.calibrators.percentile import Percentile
from qtk.calibrators.tf_enhanced import TfEnhanced
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.errors import CalibrationError
from qtk.numerics.ranges import choose_range

SCHEMES = {"mse": Mse(), "percentile": Percentile(quantile=0.99), "tf_enhanced": TfEnhanced()}
SPECS = [
    QuantSpec(dtype("uint8")), QuantSpec(dtype("int4"), PerChannel(0), symmetric=True),
    QuantSpec(dtype("uint4"), PerChannel(1)), QuantSpec(dtype("int8"), PerBlock((1, 30)), symmetric=True),
    QuantSpec(dtype("fp8_e4m3"), symmetric=True), QuantSpec(dtype("uint8"), PerChannel(0)),
]


def sites(scheme):
    """Observers of every kind of site, streaming and static, of different sizes."""
    generator = torch.Generator().manual_seed(0)
    observers, specs = [], []
    for index, spec in enumerate(SPECS * 2):
        observers.append(scheme.observer(spec.granularity, static=index >= len(SPECS)))
        x = torch.randn(7, 90, generator=generator) * 2**index
        x[3] = 0
        observers[-1].observe(x)
        specs.append(spec)
    return observers, specs


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_portions_make_no_difference(scheme, monkeypatch):
    observers, specs = sites(scheme)
    together = scheme.encodings(observers, specs)
    alone = [scheme.encodings([observer], [spec])[0] for observer, spec in zip(observers, specs, strict=True)]
    monkeypatch.setattr(search, "AT_ONCE", 40)  # less than a row
    portions = scheme.encodings(observers, specs)
    for spec, *own in zip(specs, together, alone, portions, strict=True):
        assert all(encoding.spec == spec for encoding in own)
        assert own[0].equals(own[1])
        assert own[0].equals(own[2])


def test_scales_in_few_bits_hold_the_whole_range():
    spec = QuantSpec(dtype("fp4_e2m1"), PerBlock((1, 32)), symmetric=True, scale_format=ScaleFormat.E8M0)
    x = torch.randn(4, 64)
    observer = Mse().observer(spec.granularity, static=True)
    observer.observe(x)
    low, high = torch.aminmax(x.reshape(4, 2, 32), dim=2)
    assert torch.equal(Mse().encodings([observer], [spec])[0].scale, choose_range(low, high, spec)[0])


def test_a_scale_that_saw_only_marks_is_named():
    observer = Mse().observer(PerChannel(0))
    observer.observe(torch.tensor([[1.0, 2.0], [-torch.inf, -torch.inf]]))
    with pytest.raises(CalibrationError, match=r"1 of 2 scales.*\(1,\)"):
        Mse().encodings([observer], [QuantSpec(dtype("int8"), PerChannel(0), symmetric=True)])
    with pytest.raises(CalibrationError, match="no data was observed"):
        Mse().encodings([Mse().observer(PerTensor())], [SPECS[0]])
