import torch

from qtk.layerwise.layer_input import OutputPower


def test_power_and_error_add_up_over_batches():
    power = OutputPower()
    assert power.measured() == (None, None)
    for _ in range(2):
        power.add(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 2.0]))
    assert power.measured() == (50.0, 8.0)
