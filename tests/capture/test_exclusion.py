import pytest
import torch
from torch import nn

import qtk
from qtk.capture.exclusion import exclude, exclude_paths, excluded_modules, module_names
from qtk.errors import CaptureError, ConfigError
from qtk.graph.sites import EXCLUDED, exclusion, label
from qtk.workflow.prepare import prepare_model
from tests.planning import branching_net
from tests.planning.branching_net import X, reasons, sim
from tests.planning.plans import BARE
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


@pytest.mark.medium
def test_the_modules_excluded_from_a_tree_are_known():
    prepared = prepare_model(PYTHON["deep"].model(), PYTHON["deep"].inputs(), modules_to_exclude=["stages.one.first"])
    exclude_paths(prepared, ["head"])
    assert sorted(excluded_modules(prepared)) == ["head", "stages.one.first"]


@pytest.mark.medium
def test_modules_to_exclude_is_the_same():
    net, inputs = branching_net.Net(lambda net, y: (net.left(y), net.right(y))).eval(), X
    by_config = qtk.QuantSim(net, inputs, config={**BARE, "exclude": ["left"]})
    by_argument = qtk.QuantSim(qtk.prepare_model(net, inputs, modules_to_exclude=["left"]), inputs, config=BARE)
    assert by_config.plan.diff(by_argument.plan) == []
    assert list(by_config.plan) == list(by_argument.plan)
    assert reasons(by_argument)["relu:out"] == "read by left, excluded by modules_to_exclude: left"


def test_an_exclusion_that_names_nothing_is_an_error():
    with pytest.raises(ConfigError, match="no op runs in a module at path 'lfet'; did you mean 'left'"):
        sim(lambda net, y: net.left(y), exclude=["lfet"])


@pytest.mark.medium
def test_a_branch_that_is_not_reached_may_be_excluded_by_the_config():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.plus, self.minus = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return self.plus(x) if float(x.sum()) > 0 else self.minus(x)

    x = torch.ones(2, 8)
    with pytest.raises(CaptureError, match=r"(?s)do not reach these.*minus .*exclude: .*in the config"):
        qtk.QuantSim(Branches(), x)
    made = qtk.QuantSim(Branches(), x, config={"version": 1, "extends": "default", "exclude": ["minus"]})
    assert "plus.weight" in made.quantizers


class Experts(nn.Module):
    """Only expert 0 and, for a negative sum, ``branch`` run."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.branch, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 4)

    def forward(self, x):
        x = self.experts[0](x) if float(x.sum()) > 0 else self.branch(self.experts[1](x))
        return self.head(x)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("exclude", [["experts", "branch"], ["expert*", "branc?"]])
def test_excluding_a_module_excludes_the_modules_in_it_that_the_example_inputs_do_not_reach(exclude):
    made = qtk.QuantSim(Experts(), torch.ones(2, 8), config={**BARE, "exclude": exclude})
    assert "head.weight" in made.quantizers
    assert not [name for name in made.quantizers if name.startswith("experts")]


@pytest.mark.medium
def test_modules_that_are_not_reached_beside_an_excluded_one_are_refused():
    with pytest.raises(CaptureError, match=r"branch\.0 ") as raised:
        qtk.QuantSim(Experts(), torch.ones(2, 8), config={**BARE, "exclude": ["experts"]})
    assert "experts." not in str(raised.value)
