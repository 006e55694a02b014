import torch

from qtk.aimet.named_encodings import named_encodings, site_shapes
from tests.zoo.prepared import simulated


def test_parameters_have_their_shape_and_activations_with_a_free_batch_none():
    sim = simulated("residual")
    shapes = site_shapes(sim.model)
    values = dict(sim.model.named_parameters())
    parameters = {each.name: each for each in named_encodings(sim.simulation) if each.is_parameter}
    assert parameters
    for name, each in parameters.items():
        assert each.shape == shapes[name] == tuple(values[name].shape)
        assert torch.equal(each.encoding.scale, sim.encodings()[name].scale)
    assert all(":" not in site for site in shapes)


def test_a_weight_that_an_op_quantizes_for_itself_is_a_parameter():
    sim = simulated("tied", config="qnn_htp")
    parameters = {each.name for each in named_encodings(sim.simulation) if each.is_parameter}
    static = {site.name for site, decided in sim.plan.items() if decided.static and site in sim.simulation.quantizers}
    assert any(":" in name for name in static), "no such weight, so the test shows nothing"
    assert len(parameters) >= len({name for name in static if sim.encodings().get(name) is not None})
