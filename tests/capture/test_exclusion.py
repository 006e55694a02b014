import pytest
import torch
from torch import nn

from qtk.capture.exclusion import exclude, module_names
from qtk.errors import CaptureError
from qtk.graph.sites import EXCLUDED, label
from qtk.workflow.prepare import prepare_model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.alias, self.spare = self.body[0], nn.Linear(4, 4)

    def forward(self, x):
        return self.body(x) + 1


def test_a_module_has_all_of_its_names():
    net = Net()
    assert module_names(net, "alias") == module_names(net, net.body[0]) == {"alias", "body.0"}


def test_what_is_no_submodule_is_an_error_with_the_nearest_name():
    with pytest.raises(CaptureError, match=r"'boddy' is no submodule of Net.*body"):
        module_names(Net(), "boddy")
    with pytest.raises(CaptureError, match="a ReLU is no submodule of Net"):
        module_names(Net(), nn.ReLU())


def test_the_ops_of_excluded_modules_are_marked_and_those_that_run_none_are_noted():
    prepared = prepare_model(Net(), torch.randn(2, 4), verify=False)
    assert list(exclude(prepared, [{"body"}, {"spare"}])) == ["modules_to_exclude: spare runs no op"]
    ops = [node for node in prepared.graph.nodes if node.op == "call_function"]
    assert [label(node, EXCLUDED) for node in ops] == ["1", "1", None]
