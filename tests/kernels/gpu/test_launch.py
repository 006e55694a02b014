import pytest
import torch

launch = pytest.importorskip("qtk.kernels.gpu.launch")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_tickets_are_zero_shared_and_grow():
    few = launch.tickets(DEVICE, 3)
    assert few.numel() >= 3
    assert launch.tickets(DEVICE, few.numel()) is few
    more = launch.tickets(DEVICE, few.numel() + 1)
    assert more.numel() > few.numel()
    assert (more.dtype, bool(more.any())) == (torch.int32, False)
    assert launch.tickets(DEVICE, 1) is more


def test_a_grid_has_programs_and_the_launch_a_device():
    assert launch.programs(DEVICE) >= 1
    with launch.on_device_of(torch.zeros(1, device=DEVICE)):
        assert DEVICE.type == "cpu" or torch.cuda.current_device() == torch.zeros(1, device=DEVICE).device.index
