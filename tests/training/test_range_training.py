import inspect

import qtk
from qtk.training.range_training import RangeTraining


def test_they_are_methods_of_the_simulation():
    names = [name for name, member in vars(RangeTraining).items() if inspect.isfunction(member) and name[0] != "_"]
    assert names == ["learn_ranges", "fix_ranges", "range_parameters", "weight_parameters", "track_weights"]
    assert all(getattr(qtk.QuantSim, name) is vars(RangeTraining)[name] for name in names)
