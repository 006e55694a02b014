import pytest
import torch
from torch import nn

from qtk.capture.exclusion import exclude, exclude_paths, excluded_modules, module_names
from qtk.errors import CaptureError, ConfigError
from qtk.graph.sites import EXCLUDED, exclusion, label
from qtk.workflow.prepare import prepare_model
from tests.zoo.python import PYTHON


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
    assert [label(node, EXCLUDED) for node in ops] == ["modules_to_exclude", "modules_to_exclude", None]


def excluded(prepared):
    nodes = [node for node in prepared.graph.nodes if node.op == "call_function"]
    return [exclusion(node) for node in nodes]


def test_a_config_excludes_modules_by_path():
    prepared = prepare_model(Net(), torch.randn(2, 4), verify=False)
    exclude_paths(prepared, ["body.*"])
    assert excluded(prepared) == ["excluded by exclude: body.0", "excluded by exclude: body.1", None]
    assert excluded_modules(prepared) == ["body.0", "body.1"]
    assert "excluded, in float with what they read: body.0, body.1" in str(prepared.report)
    exclude_paths(prepared, ["body"])
    assert excluded(prepared) == ["excluded by exclude: body", "excluded by exclude: body", None]
    exclude_paths(prepared, [])
    assert excluded(prepared) == [None, None, None]
    assert "excluded" not in str(prepared.report)


def test_a_config_does_not_take_back_what_was_excluded_before():
    prepared = prepare_model(Net(), torch.randn(2, 4), modules_to_exclude=["body.1"], verify=False)
    exclude_paths(prepared, ["body"])
    assert excluded(prepared) == ["excluded by exclude: body", "excluded by modules_to_exclude: body.1", None]
    exclude_paths(prepared, [])
    assert excluded(prepared) == [None, "excluded by modules_to_exclude: body.1", None]


@pytest.mark.parametrize("glob", ["spare", "bdoy*"])
def test_a_path_at_which_nothing_runs_is_an_error(glob):
    prepared = prepare_model(Net(), torch.randn(2, 4), verify=False)
    with pytest.raises(ConfigError, match=r"exclude: no op runs in a module at path .*body"):
        exclude_paths(prepared, ["body", glob])
    assert excluded(prepared) == [None, None, None]


def test_the_modules_excluded_from_a_tree_are_known():
    prepared = prepare_model(PYTHON["deep"].model(), PYTHON["deep"].inputs(), modules_to_exclude=["stages.one.first"])
    exclude_paths(prepared, ["head"])
    assert sorted(excluded_modules(prepared)) == ["head", "stages.one.first"]
