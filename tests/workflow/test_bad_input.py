"""What cannot be prepared is refused in words that name the cause; what can, has a line in the report."""

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn

import qtk
from qtk.errors import CalibrationError, CaptureError, ConfigError, VerificationError
from tests.zoo.python import sign

X = torch.randn(4, 8)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, a, b, *, scale=1.0):
        return self.last(self.first(a) + b) * scale


class Parent(nn.Module):
    """Python around one child."""

    def __init__(self, child):
        super().__init__()
        self.child, self.head = child, nn.Linear(8, 4)

    def forward(self, x):
        x = x * sign(x)
        return self.head(self.child(x) + x)


@contextlib.contextmanager
def left_alone(model: nn.Module, *inputs: Tensor):
    """Attributes, tensors, flags and hooks of the model, its inputs and the random state stay as they are."""

    def look():
        members = [item for module in model.modules() for item in vars(module).items()]
        return [(key, list(value) if isinstance(value, dict) else value) for key, value in members]

    before, state, given = look(), copy.deepcopy(model.state_dict()), [value.clone() for value in inputs]
    random = torch.get_rng_state()
    yield
    assert look() == before
    assert torch.equal(torch.get_rng_state(), random)
    for a, b in zip((*state.values(), *given), (*model.state_dict().values(), *inputs), strict=True):
        assert a.is_meta == b.is_meta
        assert a.is_meta or torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (X, r"tensors of shape \[\(4, 8\)\]\): TypeError: .*missing 1 required positional argument: 'b'"),
        ((X, X, X), "takes 3 positional arguments but 4 were given"),
        ({"a": X, "c": X}, "got an unexpected keyword argument 'c'"),
        ({"a": X}, "missing 1 required positional argument: 'b'"),
        (([X], X), "must be Tensor, not list"),
        ((X.numpy(), X), r"must be Tensor, not numpy\.ndarray"),
        ((X, X[:, :5]), r"tensors of shape \[\(4, 8\), \(4, 5\)\]\): RuntimeError: The size of tensor a"),
        ((X.int(), X), "RuntimeError: .*same dtype"),
        ((), "missing 2 required positional arguments"),
    ],
)
@pytest.mark.parametrize("made", [qtk.prepare_model, qtk.QuantSim])
def test_inputs_of_another_structure_are_refused_with_their_shapes(inputs, said, made):
    model = Two().train()
    with left_alone(model, X), pytest.raises(CaptureError, match=f"Two does not run on its example inputs .*{said}"):
        made(model, inputs)


@pytest.mark.parametrize("inputs", [3, "x", {X}, iter([X]), nn.Linear(1, 1), [3, None]])
def test_inputs_of_another_type_are_refused(inputs):
    model = Two()
    with left_alone(model), pytest.raises(CaptureError, match=r"must be a tensor, a tuple or a dict|does not run on"):
        qtk.prepare_model(model, inputs)


def test_a_model_on_two_devices_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))
    with left_alone(model, X), pytest.raises(CaptureError, match=r"Sequential does not run .* device meta"):
        qtk.prepare_model(model, X)


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        raise KeyError("boom")


@pytest.mark.parametrize("model", [Raises(), nn.Sequential(nn.Linear(8, 8), Raises()), Parent(Raises())])
def test_a_forward_that_raises_is_quoted(model):
    with left_alone(model, X), pytest.raises(CaptureError, match=r"does not run on its .*KeyError: 'boom'"):
        qtk.prepare_model(model, X)


@pytest.mark.parametrize("child", [Raises(), nn.Linear(8, 8, device="meta"), nn.Linear(7, 8)])
def test_the_submodule_that_raises_is_named(child):
    with pytest.raises(CaptureError, match=r"\bchild\b"):
        qtk.prepare_model(Parent(nn.Sequential(nn.ReLU(), child)), X)


class Mutates(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(2))


def double(module, args):
    args[0].mul_(2)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_pre_hook(double)
    return module


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("make", [lambda: Mutates(8, 8), lambda: hooked(nn.Linear(8, 8))])
@pytest.mark.parametrize("around", [lambda model: model, lambda model: nn.Sequential(model, nn.ReLU())])
def test_a_model_that_changes_its_input_by_code_or_by_a_hook_works_on_a_copy(make, around):
    model = around(make())
    with left_alone(model, X):
        prepared = qtk.prepare_model(model, X)
        found = prepared(X)
    assert torch.equal(found, model(X.clone()))
    assert f"forward of {type(model).__name__} changes its input 0 in place" in str(prepared.report)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("make", "rung"), [(lambda: Mutates(8, 8), "export"), (lambda: hooked(nn.Linear(8, 8)), "opaque")]
)
def test_a_child_that_changes_its_input_still_does_so_for_the_parent_that_reads_it(make, rung):
    model = Parent(make())
    with left_alone(model, X):
        prepared = qtk.prepare_model(model, X)
    assert next(part.rung for part in prepared.report.parts if part.path == "child") == rung
    other = torch.randn(7, 8)
    assert torch.equal(prepared(other), model(other))
    sim = qtk.QuantSim(model, X)
    sim.compute_encodings([X], progress=False)
    assert ("child.weight" in sim.quantizers) == (rung == "export")


class Positive(nn.Module):
    """As many values as are positive."""

    def forward(self, x):
        return x[x > 0]


class Listed(nn.Module):
    """The same, in Python."""

    def forward(self, x):
        return torch.stack([value for value in x.flatten() if float(value) > 0])


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("chooser", "rung"), [(Positive, "export"), (Listed, "python")])
def test_outputs_of_any_size_are_computed(chooser, rung):
    model = nn.Sequential(nn.Linear(8, 8), chooser())
    with left_alone(model, X):
        prepared = qtk.prepare_model(model, X)
    assert prepared.report.rung == rung
    for x in (X, torch.randn(9, 8), -X[:2]):
        assert torch.equal(prepared(x), model(x))
    if rung == "python":
        assert "  1 (Listed): opaque, 0.0% of the parameters  Listed cannot be captured" in str(prepared.report)
    sim = qtk.QuantSim(model, X)
    sim.compute_encodings([X], progress=False)
    assert "0.weight" in sim.encodings()


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("around", [lambda child: child, Parent])
def test_not_a_number_prepares_and_is_named_in_calibration(around):
    model = around(nn.Sequential(nn.Linear(8, 8), Log(), nn.Linear(8, 8)))
    assert model(X).isnan().any()
    with left_alone(model, X):
        prepared = qtk.prepare_model(model, X)
    assert prepared.report.eval_difference == 0.0
    assert torch.equal(prepared(X).nan_to_num(7), model(X).nan_to_num(7))
    sim = qtk.QuantSim(model, X)
    with pytest.raises(CalibrationError, match=r"batch 0: (child\.)?1:out: \d+ NaN among the 32 elements"):
        sim.compute_encodings([X], progress=False)


@pytest.mark.medium
def test_a_weight_that_is_not_a_number_is_named():
    model = Parent(nn.Linear(8, 8))
    with torch.no_grad():
        model.child.weight[0, 0] = float("nan")
    sim = qtk.QuantSim(model, X)
    with pytest.raises(CalibrationError, match=r"^child\.weight: 1 NaN among the 64 elements"):
        sim.compute_encodings([X], progress=False)


NAMES = ("graph", "code", "meta", "recompile")


class Members(nn.Module):
    """Modules, parameters or plain attributes called as what a captured graph has itself."""

    def __init__(self, make):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        for name in NAMES:
            setattr(self, name, make())

    def forward(self, x):
        x = self.fc(x)
        for name in NAMES:
            member = getattr(self, name)
            x = member(x) if callable(member) else x * member
        return x


KINDS = {"module": lambda: nn.Linear(8, 8), "parameter": lambda: nn.Parameter(torch.rand(8)), "number": lambda: 3.0}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("around", [lambda child: child, Parent])
def test_members_named_as_those_of_a_graph(kind, around):
    model = around(Members(KINDS[kind]))
    with left_alone(model, X):
        prepared = qtk.prepare_model(model, X)
    assert torch.equal(prepared(X[:3]), model(X[:3]))
    assert list(prepared.state_dict()) == list(model.state_dict())
    part = next((part for part in prepared.report.parts if part.type_name == "Members"), None)
    assert part is None or part.rung == "export"


@pytest.mark.medium
def test_a_plain_attribute_that_a_graph_has_itself_is_not_lent_and_the_parent_still_reads_it():
    class Asks(Parent):
        def forward(self, x):
            return self.head(self.child(x * sign(x)) * self.child.graph)

    model = Asks(Members(KINDS["number"]))
    prepared = qtk.prepare_model(model, X)
    assert torch.equal(prepared(X[:3]), model(X[:3]))
    part = next(part for part in prepared.report.parts if part.path == "child")
    assert (part.rung, "'Graph'" in part.reason) == ("python", True)


@pytest.mark.medium
def test_a_model_that_answers_differently_each_time_is_told_so():
    class Counts(nn.Module):
        calls = 0

        def forward(self, x):
            Counts.calls += 1
            return x * Counts.calls

    model = Parent(Counts())
    with left_alone(model, X), pytest.raises(VerificationError, match="Parent does not repeat itself: run twice"):
        qtk.prepare_model(model, X)


def test_one_dict_taken_for_keyword_arguments_is_hinted_at():
    class Takes(nn.Linear):
        def forward(self, batch):
            return super().forward(batch["x"])

    with pytest.raises(CaptureError, match="to pass one dict, wrap it in a tuple"):
        qtk.prepare_model(Takes(8, 8), {"x": X})
    assert qtk.prepare_model(Takes(8, 8), ({"x": X},)).report.rung == "export"


class Multiplies(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("adjacency", torch.eye(3).to_sparse())

    def forward(self, x, other):
        return torch.sparse.mm(self.adjacency, self.fc(x)) + torch.sparse.mm(other, x)


@pytest.mark.medium
def test_sparse_inputs_and_buffers_are_taken():
    model, inputs = Multiplies(), (torch.randn(3, 8), torch.eye(3).to_sparse())
    prepared = qtk.prepare_model(model, inputs)
    assert torch.equal(prepared(*inputs), model(*inputs))
    assert [site.name for site in qtk.QuantSim(prepared, inputs).plan] == ["fc.input:input", "fc.weight", "fc:out"]


@pytest.mark.medium
def test_scripted_models_run_and_are_listed_as_opaque():
    model = torch.jit.script(nn.Linear(8, 8))
    prepared = qtk.prepare_model(model, X)
    assert torch.equal(prepared(X), model(X))
    assert [part.rung for part in prepared.report.parts] == ["opaque"]
    mixed = nn.Sequential(nn.Linear(8, 8), model)
    assert torch.equal(qtk.prepare_model(mixed, X)(X), mixed(X))


def test_modules_in_a_plain_list_are_pointed_out():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(8, 8)]

        def forward(self, x):
            return self.layers[0](x)

    notes = qtk.prepare_model(Listed(), X).report.notes
    assert [note for note in notes if note.startswith("layers holds modules in a list")]


@pytest.mark.medium
def test_weights_outside_of_all_graphs_are_in_the_plan_with_the_reason():
    class Times(nn.Linear):
        def forward(self, x, times):
            return super().forward(x) * times

    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.other = Times(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            for times in range(1, 9):
                x = self.fc(x, times) * sign(x)
            return self.other(x) if x.sum() > 1e9 else x

    model = nn.Sequential(Steps(), nn.Linear(8, 8))
    plan = qtk.QuantSim(qtk.prepare_model(model, X, modules_to_exclude=["0.other"]), X).plan
    reasons = {site.name: reason for site, reason in plan.unquantized.items()}
    assert "opaque: Times is called with arguments of 8 kinds" in reasons["0.fc.weight"]
    assert reasons["0.other.weight"] == "its module is excluded"
    with pytest.raises(ConfigError, match=r"nothing of this model.*\n  fc.weight: .*opaque: Times is called"):
        qtk.QuantSim(qtk.prepare_model(Steps(), X, modules_to_exclude=["other"]), X)


@pytest.mark.parametrize("around", [lambda model: model, lambda model: nn.Sequential(model, nn.ReLU())])
def test_a_simulation_is_not_quantized_again(around):
    x = torch.randn(2, 4)
    sim = qtk.QuantSim(nn.Linear(4, 4), x)
    for make in (qtk.QuantSim, qtk.prepare_model):
        with pytest.raises(CaptureError, match=r"holds quantizers already.*pass the float model"):
            make(around(sim.model), x)


class Missing(nn.Module):
    """Marks what is missing by NaN."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(torch.cat([x.nan_to_num(), x.isnan().float()], 1))


def test_nan_in_an_input_names_the_setting_that_keeps_it():
    x = torch.randn(4, 4)
    x[0, 1] = torch.nan
    with pytest.raises(CalibrationError, match=r"x:input: 1 NaN .* marks what is missing, io: {inputs: float}$"):
        qtk.QuantSim(Missing().eval(), x).compute_encodings([x], progress=False)
    sim = qtk.QuantSim(Missing().eval(), x, config={"version": 1, "io": {"inputs": "float"}})
    sim.compute_encodings([x], progress=False)
    assert sim.model(x).isfinite().all()
