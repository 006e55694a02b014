import torch
import torch.nn.functional as F
from torch import nn

from qtk.graph.sites import OP, OWNER, add_labels, edge_site, is_float, label, ports, value_site
from qtk.workflow.prepare import prepare_model


def names(model, *inputs):
    prepared = prepare_model(model.eval(), inputs)
    return [value_site(node).name for node in prepared.graph.nodes if is_float(node)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return F.relu(self.fc(x) + x) + 1


def test_ops_are_numbered_inside_their_owner():
    model = nn.Sequential(Block(), Block())
    found = names(model, torch.randn(2, 4))
    assert [name for name in found if name.endswith(":out")] == [
        "0.fc:out", "0.add:out", "0.relu:out", "0.add_1:out", "1.fc:out", "1.add:out", "1.relu:out", "1.add_1:out",
    ]
    assert "0.fc.weight" in found


def test_calls_of_one_module_are_told_apart():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(self.block(x))

    found = names(Twice(), torch.randn(2, 4))
    assert "block.add:out" in found
    assert "block@1.add:out" in found or "block.add@1:out" in found
    assert len(found) == len(set(found))


def test_a_module_named_like_an_op_does_not_collide():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.add = nn.ReLU()

        def forward(self, x):
            return self.add(x) + x

    found = names(Net(), torch.randn(2, 4))
    assert len(found) == len(set(found))


def test_tuple_outputs_of_compute_ops_are_ports():
    class Net(nn.Module):
        def forward(self, x):
            variance, mean = torch.var_mean(x, dim=1)
            return variance + mean

    found = names(Net(), torch.randn(2, 4))
    assert "var_mean:out[0]" in found
    assert "var_mean:out[1]" in found


def test_edges_are_numbered_over_the_tensors_of_lists():
    class Net(nn.Module):
        def forward(self, x, y):
            return torch.cat([x, y, x], dim=1)

    prepared = prepare_model(Net(), (torch.randn(2, 3), torch.randn(2, 3)))
    cat = next(node for node in prepared.graph.nodes if label(node, OP) == "concat")
    assert [edge_site(port).name for port in ports(cat)] == ["concat:in[0]", "concat:in[1]", "concat:in[2]"]


def test_annotating_a_node_leaves_shared_dicts_alone():
    prepared = prepare_model(nn.Sequential(nn.Linear(2, 2)).eval(), torch.randn(2, 2))
    node = next(node for node in prepared.graph.nodes if node.op == "call_function")
    before = node.meta["custom"]
    snapshot = dict(before)
    add_labels(node, mark="yes")
    assert before == snapshot
    assert label(node, "mark") == "yes"
    assert label(node, OWNER) == "0"
