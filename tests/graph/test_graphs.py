"""Which captured graphs a prepared model holds, and which lie in which."""

import pytest
from torch import fx, nn

import qtk
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import graphs, nested_graphs, roots
from tests.zoo.models import ZOO
from tests.zoo.python import PYTHON


def prepared(entry):
    return qtk.prepare_model(entry.model(), entry.inputs(), verify=False)


@pytest.mark.medium
def test_a_model_that_is_one_graph_is_its_own_root():
    model = prepared(ZOO["residual"])
    assert graphs(model) == roots(model) == {"": model}


@pytest.mark.medium
def test_islands_are_the_roots_of_a_tree():
    model = prepared(PYTHON["deep"])
    assert set(roots(model)) == set(PYTHON["deep"].islands)
    assert graphs(model) == roots(model)
    assert roots(model)["head"] is model.head


@pytest.mark.medium
def test_a_graph_inside_a_module_of_another_is_nested_in_the_node_that_calls_it():
    model = prepared(ZOO["gru"])
    found = graphs(model)
    inner = {path: graph for path, graph in found.items() if path}
    assert next(iter(found)) == ""
    assert inner
    assert roots(model) == {"": model}
    nested = [graph for node in model.graph.nodes for graph in nested_graphs(node).values()]
    assert len(nested) == len(inner)
    assert set(nested) == set(inner.values())


@pytest.mark.medium
def test_graphs_are_found_at_the_path_where_modules_are_named_first():
    leaf = CapturedGraph(nn.Module(), fx.Graph())  # of no modules
    model = nn.ModuleDict({"a": nn.ModuleDict({"b": leaf, "c": nn.ReLU()}), "d": nn.ModuleList([leaf, nn.ReLU()]),
                           "e": prepared(ZOO["gru"])})
    named = [path for path, module in model.named_modules() if isinstance(module, CapturedGraph)]
    assert list(graphs(model)) == named
    assert named[:2] == ["a.b", "e"]


@pytest.mark.medium
def test_a_name_that_begins_like_another_is_not_inside_it():
    graph = prepared(ZOO["residual"])

    class Two(qtk.PreparedModel):
        def __init__(self):
            super().__init__()
            self.head, self.head2 = graph, prepared(ZOO["residual"])

    assert list(roots(Two())) == ["head", "head2"]
