import pytest
import torch

from qtk.calibrators.moving_average import MovingAverage
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerTensor
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError

SPEC = QuantSpec(dtype("uint8"))


def test_the_averaged_range_just_fits():
    calibrator = MovingAverage(momentum=0.5)
    observer = calibrator.observer(PerTensor())
    observer.observe(torch.tensor([0.0, 100.0]))
    observer.observe(torch.tensor([0.0, 155.0]))
    encoding = calibrator.encodings([observer], [SPEC])[0]
    assert encoding.scale.item() == 0.5
    assert encoding.zero_point.item() == 0


def test_no_data_and_no_momentum_are_errors():
    with pytest.raises(CalibrationError, match="no data was observed"):
        MovingAverage().encodings([MovingAverage().observer(PerTensor())], [SPEC])
    with pytest.raises(CalibrationError, match="momentum"):
        MovingAverage(momentum=0).observer(PerTensor())
