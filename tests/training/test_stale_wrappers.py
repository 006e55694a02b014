import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from qtk.errors import EncodingError
from tests.training.test_learned_ranges import batches, simulated


@pytest.fixture(autouse=True)
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.medium
def test_a_wrapper_made_before_refuses_its_next_forward_pass():
    sim = simulated()
    before = DistributedDataParallel(sim.model)
    of_other = DistributedDataParallel(simulated().model)
    before(batches()[0])
    sim.learn_ranges()
    for _ in range(2):
        with pytest.raises(EncodingError, match=r"DistributedDataParallel was made before sim\.learn_ranges.* 5 ranges,"
                                                r" the first of them input:input.* then wrap sim\.model"):
            before(batches()[0])
    of_other(batches()[0])
    after = DistributedDataParallel(sim.model)
    after(batches()[0]).sum().backward()
    assert all(parameter.grad is not None for parameter in sim.range_parameters())
    sim.learn_ranges()  # makes no new parameters
    after(batches()[0])
    sim.fix_ranges()
    before(batches()[0])


def test_a_model_inside_the_wrapped_one_counts():
    sim = simulated()
    whole = DistributedDataParallel(torch.nn.Sequential(sim.model, torch.nn.Identity()))
    sim.learn_ranges("*weight")
    with pytest.raises(EncodingError, match="was made before"):
        whole(batches()[0])
