"""Folds the batch norms of a copy of a model, and counts the modules and calls that are left."""

import copy

import torch

import qtk
from qtk.graph.graphs import graphs
from qtk.operators.targets import batch_norm_called


def folded(model, x):
    prepared = qtk.prepare_model(copy.deepcopy(model), x)
    return prepared, qtk.fold_batch_norms(prepared)


def count(model, kind):
    return sum(isinstance(module, kind) for module in model.modules())


def norms(model):
    nodes = [node for graph in graphs(model).values() for node in graph.graph.nodes]
    return sum(batch_norm_called(node) is not None for node in nodes)


def inputs(shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
