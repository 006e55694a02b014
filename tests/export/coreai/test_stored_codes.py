import torch

from qtk.export.coreai.library import load
from qtk.export.coreai.stored_codes import StoredCodes
from qtk.export.simulated_sites import simulated_sites
from qtk.graph.graphs import roots
from qtk.numerics.codes import codes_of
from tests.export.coreai.small_file import needs_converter, small


@needs_converter
def test_small_and_large_constants_are_read():
    sim, _, folder = small()
    stored = [value for value in StoredCodes(load(folder / "model.aimodel").program).values if value.codes is not None]
    constants = {site.name: site for site in simulated_sites(roots(sim.model)[""]) if site.constant is not None}
    assert [value.codes.shape for value in stored] == [(8, 3, 3, 3), (5, 72)]  # the second is a blob
    for value, name in zip(stored, ("0.weight", "4.weight"), strict=True):
        site = constants[name]
        assert torch.equal(value.codes, codes_of(site.constant, site.encoding))
        assert torch.equal(value.scale, site.encoding.scale)
        assert value.zero_point.tolist() == [0] * len(value.scale)
