import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtk.operators.lookup import row_of
from qtk.operators.op_row import Role
from qtk.operators.op_table import ROWS
from qtk.workflow.prepare import prepare_model


def only_row(function, *inputs, parameters=()):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for index, parameter in enumerate(parameters):
                self.register_parameter(f"p{index}", nn.Parameter(parameter))

        def forward(self, *args):
            return function(*args, *self.parameters())

    graph = prepare_model(Net(), inputs, dynamic_shapes=None, verify=False).graph
    found = [node for node in graph.nodes if node.op == "call_function"]
    return found[-1], row_of(found[-1])


@pytest.mark.medium
@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_row_names_an_operator_that_exists(name):
    namespace, _, op = name.rpartition("::")
    if namespace in ("torchvision", "transformers"):
        pytest.importorskip(namespace)
    if namespace == "qtk":
        return  # a module of qtk.nn, which row_of finds by its type
    packet = getattr(getattr(torch.ops, namespace or "aten"), op.partition(".")[0])
    if "." in name:
        assert name.partition(".")[2] in packet.overloads()


X = torch.randn(2, 4, 6)


@pytest.mark.parametrize("running", [False, True])
def test_instance_norm_has_its_row_with_and_without_running_statistics(running):
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=running)
    graph = prepare_model(nn.Sequential(norm).eval(), X).graph
    rows = [row_of(node) for node in graph.nodes if node.op in ("call_function", "call_module")]
    assert "instance_norm" in [row.kind for row in rows if row is not None]


@pytest.mark.parametrize(
    ("function", "kind", "role"),
    [
        (lambda x: F.pad(x, (1, 1)), "pad", Role.MOVEMENT),
        (lambda x: F.pad(x, (1, 1), value=3.0), "pad", Role.COMPUTE),
        (lambda x: F.pad(x, (1, 1), mode="reflect"), "pad", Role.MOVEMENT),
        (lambda x: x.amax(1), "pick", Role.MOVEMENT),
        (lambda x: torch.max(x, x * 2), "maximum", Role.COMPUTE),
        (lambda x: torch.cat([x, x]), "concat", Role.MERGE),
        (lambda x: x.masked_fill(x > 0, 0.0), "masked_fill", Role.MOVEMENT),
        (lambda x: F.avg_pool1d(x, 2), "avg_pool1d", Role.COMPUTE),
    ],
)
def test_the_role_follows_what_the_call_does(function, kind, role):
    _, row = only_row(function, X)
    assert (row.kind, row.role) == (kind, role)


@pytest.mark.parametrize(
    ("function", "weight", "axes"),
    [
        (lambda x, w: x @ w, torch.randn(6, 3), (1, 0)),
        (lambda x, w: w @ x, torch.randn(3, 4), (0, 1)),
        (lambda x, w: torch.einsum("bij,jk->bik", x, w), torch.randn(6, 3), (1, 0)),
        (lambda x, w: torch.einsum("oj,bij->bio", w, x), torch.randn(3, 6), (0, 1)),
        (lambda x, w: F.conv_transpose1d(x, w), torch.randn(4, 3, 2), (1, 0)),
        (lambda x, w: F.prelu(x, w), torch.randn(4), (0, 0)),
    ],
)
def test_the_axes_of_a_weight_are_its_output_and_input_channels(function, weight, axes):
    node, row = only_row(function, X, parameters=[weight])
    (parameter,) = (arg for arg in node.all_input_nodes if arg.op == "get_attr")
    assert row.weight_axes(node, parameter) == axes
    # independent: the output changes along one axis only when one output channel of the weight does
    with torch.no_grad():
        before = function(X, weight)
        changed = weight.clone()
        changed.select(axes[0], 0).add_(1.0)
        differs = (function(X, changed) != before).nonzero()
    assert any(len(set(differs[:, axis].tolist())) == 1 for axis in range(before.ndim))
