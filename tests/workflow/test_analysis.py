"""QuantSim's methods of analysis call one function each; what these do is tested beside them."""

import inspect

import torch
from torch import nn

import qtk
from qtk.workflow.analysis import Analysis


def test_every_method_says_what_its_function_does():
    sim, batches = qtk.QuantSim(nn.Linear(4, 2).eval(), torch.randn(8, 4)), [torch.randn(8, 4)]
    sim.compute_encodings(batches, progress=False)
    methods = [name for name, value in vars(Analysis).items() if inspect.isfunction(value) and not name.startswith("_")]
    assert methods == ["compare", "sensitivity", "drift", "report"]
    assert {error.site for error in sim.compare(batches, progress=False)} == set(sim.quantizers)
    assert {row.name for row in sim.sensitivity(batches, top=0, progress=False)} == set(sim.quantizers)
