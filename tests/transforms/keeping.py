"""Batch norms that stay live behind their layers."""

import copy

import qtk
from qtk.graph.graphs import graphs
from qtk.transforms.keep_batch_norms import keep_batch_norms
from tests.transforms.nets import INTO_LAYERS

KEPT = [name for name in INTO_LAYERS if "before" not in name and name not in ("both_sides", "some_tokens")]
AT_EXPORT = {"version": 1, "extends": "default", "fold_batch_norms": "at_export"}


def kept(model, x):
    prepared = qtk.prepare_model(copy.deepcopy(model), x)
    return prepared, keep_batch_norms(prepared, prepared.example)


def calls(model, find):
    return sum(find(node) is not None for graph in graphs(model).values() for node in graph.graph.nodes)
