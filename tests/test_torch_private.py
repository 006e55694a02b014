"""What qtk takes from torch's private parts exists and does what it is used for: a test for each name."""

import contextlib
import copy
import importlib
import inspect
import math
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from qtk import torch_private
from qtk.torch_private import (
    CALL_ATTRIBUTES,
    GLOBAL_HOOKS,
    GRAPH_MODULE_NAMES,
    HOOK_TABLES,
    MODULE_CALL,
    MODULE_TABLES,
    BatchNormBase,
    CallStructure,
    DropoutBase,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    assert_when_run,
    base_of,
    below_autograd,
    call_structure,
    checking_sizes,
    custom_functions,
    decomposition_table,
    drop_input_guards,
    empty_like,
    flatten_as,
    function_modes,
    fx_pytree,
    graph_from_bytes,
    graph_to_bytes,
    has_length_hint,
    has_onnx_function,
    hooks,
    hooks_on_saved_tensors_work,
    in_backward,
    is_composed,
    is_exporting,
    is_in_onnx_export,
    is_traced,
    keep_result_as,
    length_hint,
    length_when,
    load_decomposed_ops,
    onnx_translations_kept,
    python_kernel,
    pytree,
    register_decomposition,
    return_dict,
    rnn_kernels,
    rnn_parameter_names,
    saves_result,
    schema_of,
    size_guards,
    size_text,
    storage_of,
    version_of,
    without_modes,
)

ATEN = torch.ops.aten


class Nested(nn.Module):
    def forward(self, pair, *, options):
        return {"sum": pair[0] + pair[1] + options["x"]}


@pytest.fixture(scope="module")
def program():
    x = torch.ones(2, 3)
    return torch.export.export(Nested(), ((x, x),), {"options": {"x": x}}, strict=False)


def test_every_name_has_a_test():
    assert {name for name in vars(torch_private) if name in torch_private.__all__} == set(torch_private.__all__)
    tested = " ".join(name for name in globals() if name.startswith("test_")).lower()
    assert [name for name in torch_private.__all__ if name.lower() not in tested] == []


def test_hook_tables():
    module = nn.Identity()
    module.register_forward_pre_hook(print)
    module.register_forward_hook(print)
    module.register_full_backward_pre_hook(print)
    module.register_full_backward_hook(print)
    assert [[*getattr(module, table).values()] for table in HOOK_TABLES] == [[print]] * 4


def test_empty_like(program):
    graph = program.module(check_guards=False).graph
    empty = empty_like(graph)
    assert not empty.nodes
    values = {}
    for node in graph.nodes:
        values[node] = empty.node_copy(node, values.__getitem__)
    x = torch.ones(2, 3)
    assert torch.equal(fx.GraphModule(nn.Module(), empty)((x, x), options={"x": x})["sum"], 3 * x)
    assert call_structure(empty) is not call_structure(graph)


def test_pytree():
    x = torch.ones(1)
    nested = {"a": [x, 2], "b": (None,)}
    leaves, structure = pytree.tree_flatten(nested)
    assert leaves == pytree.tree_leaves(nested) == [x, 2, None]
    assert pytree.tree_unflatten(leaves, structure) == nested
    assert pytree.tree_map(lambda leaf: 0, nested) == {"a": [0, 0], "b": (0,)}
    assert pytree.tree_map_only(int, lambda leaf: leaf + 1, nested) == {"a": [x, 3], "b": (None,)}
    paths = [path for path, _ in pytree.tree_flatten_with_path(nested)[0]]
    assert pytree.keystr(paths[1]) == "['a'][1]"
    assert isinstance(paths[1][0], pytree.MappingKey)
    assert isinstance(paths[1][1], pytree.SequenceKey)
    assert (paths[1][0].key, paths[1][1].idx) == ("a", 1)
    assert pytree.GetAttrKey("name").name == "name"
    assert isinstance(structure, pytree.TreeSpec)
    assert structure.num_children == 2
    assert structure.context == ["a", "b"]
    assert [child.is_leaf() for child in structure.child(0).children()] == [True, True]


def test_python_kernel():
    class Net(nn.Module):
        def forward(self, x, hidden, *parameters):
            return ATEN.gru.input(x, hidden, parameters, False, 1, 0.0, False, False, False)[0]

    calls = []

    def kernel(x, hidden, *settings):
        calls.append(settings)
        return x.new_zeros(*x.shape[:-1], hidden.shape[-1]), hidden.clone()

    inputs = torch.zeros(3, 2, 4), torch.zeros(1, 2, 5), torch.zeros(15, 4), torch.zeros(15, 5)
    before = dict(ATEN.gru.input.py_kernels)
    with python_kernel(ATEN.gru.input, kernel):
        torch.export.export(Net(), inputs, strict=False)
    assert before
    assert calls
    assert before == ATEN.gru.input.py_kernels
    calls.clear()
    torch.export.export(Net(), inputs, strict=False)
    assert not calls


def test_opoverload_and_schema_of():
    add = ATEN.add_.Tensor
    assert isinstance(add, OpOverload)
    assert add.namespace == "aten"
    schema = schema_of(add)
    assert (schema.name, schema.overload_name, schema.is_mutable) == ("aten::add_", "Tensor", True)
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert schema.arguments[2].default_value == 1
    assert schema_of(ATEN.relu.default).overload_name == ""
    assert not schema_of(ATEN.relu.default).is_mutable
    assert schema_of(len) is None


def test_higherorderoperator():
    assert isinstance(torch.ops.higher_order.cond, HigherOrderOperator)
    assert not isinstance(ATEN.relu.default, HigherOrderOperator)
    assert not isinstance(torch.ops.higher_order.cond, OpOverload)


def test_call_structure_is_a_callstructure_and_flatten_as_follows_it(program):
    graph = program.module().graph
    structure = call_structure(graph)
    assert isinstance(structure, CallStructure)
    assert [name for name in structure.orig_args if name != "self"] == ["pair", "options"]
    assert structure.in_spec.child(0).num_children == 1
    by_position, by_name = structure.in_spec.children()
    assert (by_position.num_children, by_name.context) == (1, ["options"])
    assert structure.out_spec.context == ["sum"]
    assert flatten_as((((1, 2),), {"options": {"x": 3}}), structure.in_spec) == [1, 2, 3]
    with pytest.raises((TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError)):
        flatten_as((((1,),), {"options": {"x": 3}}), structure.in_spec)
    assert call_structure(fx.symbolic_trace(nn.ReLU()).graph) is None


def test_fx_pytree_takes_a_class_apart_whatever_is_no_tensor_in_it():
    kind = type("Box", (), {"__init__": lambda self, x, note: vars(self).update(x=x, note=note)})
    pytree.register_pytree_node(kind, lambda box: ([box.x], box.note), lambda values, note: kind(*values, note))
    structure = pytree.tree_structure([kind(1, "a")])
    with pytest.raises(RuntimeError):
        flatten_as([kind(2, "b")], structure)
    fx_pytree.register_pytree_flatten_spec(kind, lambda box, _: [box.x])
    assert kind in fx_pytree.SUPPORTED_NODES
    assert flatten_as([kind(2, "b")], structure) == [2]


class OfFours(nn.Module):
    def forward(self, x):
        return 2 * x if x.shape[0] % 4 == 0 else x


def test_graph_to_bytes(program):
    graph = copy.deepcopy(program.graph_module).graph
    assert len(graph_to_bytes(graph, ("val",))) > len(graph_to_bytes(graph, ()))
    next(iter(graph.nodes)).meta["custom"] = lambda: None
    with pytest.raises((pickle.PicklingError, AttributeError)):
        graph_to_bytes(graph, ("custom",))


def test_graph_from_bytes(program):
    graph = copy.deepcopy(program.graph_module).graph
    for node in graph.nodes:
        node.meta["custom"] = {"label": node.name}
    again = graph_from_bytes(graph_to_bytes(graph, ("custom", "val", "nn_module_stack")))
    for node, twin in zip(graph.nodes, again.nodes, strict=True):
        assert (node.name, node.op, node.target, str(node.args)) == (twin.name, twin.op, twin.target, str(twin.args))
        assert twin.meta["custom"] == {"label": node.name}
        assert str(twin.meta.get("val")) == str(node.meta.get("val"))
        assert "stack_trace" not in twin.meta


def ours(x, sizes):
    return x[sizes]


def test_graph_from_bytes_of_functions_and_nested_arguments():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(ours, (x, slice(0, graph.call_method("size", (x, 0)), None))), {"x": x}])
    again = graph_from_bytes(graph_to_bytes(graph, ()))
    assert [node.target for node in again.nodes] == [node.target for node in graph.nodes]
    assert str(again) == str(graph)
    again.lint()


def test_drop_input_guards():
    shapes = ({0: torch.export.Dim.AUTO},)
    x = torch.ones(8, 3)
    guarded, free = (torch.export.export(OfFours(), (x,), dynamic_shapes=shapes, strict=False) for _ in range(2))
    with pytest.raises(AssertionError, match="Guard failed"):
        guarded.module()(x[:6])
    drop_input_guards(free)
    assert torch.equal(free.module()(x[:6]), 2 * x[:6])


def test_faketensormode():
    value = FakeTensorMode().from_tensor(torch.ones(2, 3, dtype=torch.float16))
    assert (tuple(value.shape), value.dtype, value.device.type) == ((2, 3), torch.float16, "cpu")
    assert value.fake_mode.from_tensor(torch.ones(1)).shape == (1,)


def test_torchdispatchmode():
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    with Names():
        F.relu(torch.ones(1))
    assert seen == [ATEN.ones.default, ATEN.relu.default]


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batchnormbase(kind):
    assert isinstance(kind(2), BatchNormBase)
    assert not isinstance(nn.LayerNorm(2), BatchNormBase)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_dropoutbase(kind):
    assert isinstance(kind(), DropoutBase)
    assert not isinstance(nn.ReLU(), DropoutBase)


def test_hooks():
    module, other = nn.ReLU(), nn.ReLU()
    module.register_forward_hook(print)
    assert hooks(module) == {print}
    assert hooks(other) == set()
    for register in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        module = nn.ReLU()
        getattr(module, f"register_{register}_hook")(print)
        assert len(hooks(module)) == 1


def test_global_hooks():
    before = [len(table) for table in GLOBAL_HOOKS]
    for register in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        handle = getattr(nn.modules.module, f"register_module_{register}_hook")(lambda *given: None)
        assert sum(map(len, GLOBAL_HOOKS)) == sum(before) + 1
        handle.remove()


def test_function_modes():
    with torch.device("cpu"):
        assert function_modes() == 1
    assert function_modes() == 0


def test_below_autograd():
    x = torch.ones(2, requires_grad=True)
    with below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_rnn_kernels_and_rnn_parameter_names(kind):
    torch.manual_seed(0)
    build = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": partial(nn.RNN, nonlinearity="relu")}[kind]
    net = build(3, 4, num_layers=2, bidirectional=True)
    names = rnn_parameter_names(net)
    assert names[1] == ["weight_ih_l0_reverse", "weight_hh_l0_reverse", "bias_ih_l0_reverse", "bias_hh_l0_reverse"]
    assert [name for step in names for name in step] == [name for name, _ in net.named_parameters()]
    weights = [net.get_parameter(name) for step in names for name in step]
    x, state = torch.randn(5, 2, 3), torch.zeros(4, 2, 4)
    states = [state, state] if kind == "lstm" else state
    with torch.no_grad():
        output, *_ = getattr(rnn_kernels, kind)(x, states, weights, True, 2, 0.0, False, True, False)
        assert torch.equal(output, net(x)[0])


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_rnn_kernels_of_cells(kind):
    cell = {"lstm": nn.LSTMCell(3, 4), "gru": nn.GRUCell(3, 4), "rnn_tanh": nn.RNNCell(3, 4),
            "rnn_relu": nn.RNNCell(3, 4, nonlinearity="relu")}[kind]
    x, state = torch.randn(2, 3), torch.zeros(2, 4)
    states = (state, state) if kind == "lstm" else state
    with torch.no_grad():
        found = getattr(rnn_kernels, f"{kind}_cell")(x, states, *cell.parameters())
        expected = cell(x, states)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_saves_result():
    x = torch.randn(3, requires_grad=True)
    assert [saves_result(value) for value in (x, x * 2, x.sigmoid(), x.relu(), F.gelu(x))] == [
        False, False, True, True, False]


def test_keep_result_as():
    x = torch.randn(3, requires_grad=True)
    value = x.sigmoid()
    keep_result_as(value, lambda: torch.full((3,), 0.5))
    assert torch.autograd.grad(value.sum(), x)[0].tolist() == [0.25] * 3  # y · (1 - y)


def test_assert_when_run():
    assert_when_run(torch.tensor(True), "holds")
    with pytest.raises(RuntimeError, match="does not"):
        assert_when_run(torch.tensor(False), "does not")


def test_hooks_on_saved_tensors_work():
    assert hooks_on_saved_tensors_work()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not hooks_on_saved_tensors_work()


def test_base_of():
    x = torch.zeros(2, 3)
    assert base_of(x) is None
    assert base_of(x[:, :2]) is x


def test_version_of():
    x = torch.ones(2)
    before = version_of(x)
    x.add_(1)
    assert version_of(x) == before + 1
    x.detach().mul_(2)
    assert version_of(x) == before + 2


def test_storage_of():
    with FakeTensorMode():
        x, y = torch.zeros(2, 3), torch.zeros(2, 3)
        assert storage_of(x) == storage_of(x[0].view(3, 1)) != storage_of(y)


def test_is_traced():
    seen = []

    def function(x):
        seen.append(is_traced())
        return x + 1

    function(torch.ones(2))
    torch.fx.experimental.proxy_tensor.make_fx(function)(torch.ones(2))
    torch.vmap(function)(torch.ones(2))
    torch.func.grad(lambda x: function(x).sum())(torch.ones(2))
    assert seen == [False, True, True, True]


def test_custom_functions():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(2, requires_grad=True)
    assert list(custom_functions(Double.apply(x).relu() + Double.apply(x + 1))) == [Double, Double]
    assert list(custom_functions(x + 1)) == []
    assert list(custom_functions(torch.ones(2))) == []


def test_module_tables():
    module = nn.Module()
    assert set(MODULE_TABLES) <= set(vars(module))
    module.child, module.weight = nn.Module(), nn.Parameter(torch.ones(1))
    module.register_buffer("kept", torch.ones(1), persistent=False)
    assert [list(vars(module)[name]) for name in MODULE_TABLES] == [["child"], ["weight"], ["kept"], ["kept"]]


def test_graph_module_names(program):
    assert set(GRAPH_MODULE_NAMES) <= set(vars(program.module(check_guards=False)))


class ShiftsWhenExported(nn.Module):
    def forward(self, x):
        return x + 1 if is_exporting() else x.clone()


def test_is_exporting_is_false_while_compiling():
    model, x = ShiftsWhenExported(), torch.zeros(2)
    torch._dynamo.reset()
    assert torch.compile(model, fullgraph=True, backend="eager")(x).tolist() == [0.0, 0.0]
    assert torch.export.export(model, (x,), strict=False).module()(x).tolist() == [1.0, 1.0]
    assert not is_exporting()


def test_decomposition_table_says_what_an_op_is_made_of():
    x = torch.linspace(-2, 2, 5)
    aten = torch.ops.aten
    for op, args in ((aten.celu.default, (x, 3)), (aten.addcmul.default, (x, x, x)), (aten.roll.default, (x, [2]))):
        torch.testing.assert_close(decomposition_table[op](*args), op(*args))


@pytest.mark.medium
def test_register_decomposition_and_is_in_onnx_export_meet_in_torch_onnx_export():
    seen = []

    def tripled(x):
        seen.append(is_in_onnx_export())
        return x + x + x

    torch.library.define("qtk_test::tripled", "(Tensor x) -> Tensor")
    torch.library.impl("qtk_test::tripled", "CompositeExplicitAutograd", lambda x: 3 * x)
    torch.library.register_fake("qtk_test::tripled", torch.empty_like)
    register_decomposition(torch.ops.qtk_test.tripled.default)(tripled)

    class Tripled(nn.Module):
        def forward(self, x):
            return torch.ops.qtk_test.tripled(x)

    exported = torch.onnx.export(Tripled().eval(), (torch.ones(2),), dynamo=True, verbose=False)
    assert [node.op_type for node in exported.model.graph] == ["Add", "Add"]
    assert seen
    assert all(seen)
    assert not is_in_onnx_export()


def test_length_hint_leaves_a_dynamic_axis_dynamic():
    dynamic = ({0: torch.export.Dim.AUTO},)
    program = torch.export.export(nn.ReLU(), (torch.randn(3, 4),), dynamic_shapes=dynamic, strict=False)
    (node,) = program.graph.find_nodes(op="placeholder")
    shape = node.meta["val"].shape
    assert [length_hint(length) for length in shape] == [3, 4]
    assert not str(shape[0]).isdigit()


def test_has_length_hint_is_false_of_lengths_that_data_decide():
    class Nonzero(nn.Module):
        def forward(self, x):
            return x.nonzero()

    program = torch.export.export(Nonzero(), (torch.randn(3, 4),), strict=False)
    (found,) = program.graph.output_node().all_input_nodes
    assert [has_length_hint(length) for length in found.meta["val"].shape] == [False, True]


def test_load_decomposed_ops_registers_them():
    load_decomposed_ops()
    codes = torch.ops.quantized_decomposed.quantize_per_tensor.default(torch.tensor([0.3]), 0.1, 5, 0, 255, torch.uint8)
    assert codes.tolist() == [8]


def test_return_dict_names_the_results():
    class Two(nn.Module):
        def forward(self, x):
            return x + 1, [x * 2]

    module = torch.export.export(Two(), (torch.ones(2),)).module()
    first, second = module.graph.output_node().args[0]
    return_dict(module.graph, {"a": second, "b": first})
    module.recompile()
    results = module(torch.ones(2))
    assert {name: value.tolist() for name, value in results.items()} == {"a": [2, 2], "b": [2, 2]}


def test_in_backward():
    x, seen = torch.ones(2, requires_grad=True), []
    x.register_hook(lambda gradient: seen.append(in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not in_backward()


@pytest.mark.medium
def test_has_onnx_function_knows_real_and_complex_operators(monkeypatch):
    pytest.importorskip("onnxscript")
    aten = torch.ops.aten
    with onnx_translations_kept():
        assert has_onnx_function(aten.relu.default, 19, is_complex=False)
        assert not has_onnx_function(aten.relu.default, 19, is_complex=True)
        assert has_onnx_function(aten.view_as_real.default, 19, is_complex=True)
        assert not has_onnx_function(aten.linalg_inv_ex.default, 19, is_complex=False)
    monkeypatch.setattr(torch_private, "_onnx_registry", lambda: None)
    assert has_onnx_function(aten.linalg_inv_ex.default, 19, is_complex=False)


@pytest.mark.medium
def test_onnx_translations_kept_are_what_each_call_would_parse(monkeypatch):
    pytest.importorskip("onnxscript")
    registration = importlib.import_module("torch.onnx._internal.exporter._registration")
    apis = importlib.import_module(registration.onnxscript_apis._name)
    parsed, parse = [], apis.get_torchlib_ops
    monkeypatch.setattr(apis, "get_torchlib_ops", lambda: parsed.append(1) or parse())
    listed, tools = [], importlib.import_module("torch._export.utils")
    monkeypatch.setattr(tools, "_materialize_cpp_cia_ops", lambda: listed.append(1))
    expected = registration.ONNXRegistry.from_torchlib(opset_version=21).functions
    torch_private._onnx_translations.cache_clear()
    for _ in range(2):
        with onnx_translations_kept():
            kept = registration.ONNXRegistry().from_torchlib(opset_version=21)
            tools._collect_all_valid_cia_ops()
        assert kept.opset_version == 21
        assert {op: [each.onnx_function for each in found] for op, found in kept.functions.items()} == {
            op: [each.onnx_function for each in found] for op, found in expected.items()}
        kept.functions.popitem()[1].clear()  # as a table of translations for one export changes it
    assert len(parsed) == len(listed) == 2
    registration.ONNXRegistry.from_torchlib(opset_version=21)
    assert len(parsed) == 3


def test_size_guards_are_conditions_under_which_a_graph_was_traced():
    class Halves(nn.Module):
        def forward(self, x):
            return x[:2] if x.shape[0] % 2 == 0 and x.shape[1] != 7 else x

    shapes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    program = torch.export.export(Halves(), (torch.ones(4, 3),), dynamic_shapes=shapes)
    (x,) = program.graph.find_nodes(op="placeholder")
    rows, columns = x.meta["val"].shape
    guards = size_guards(columns)
    assert guards[f"({rows} % 2) == 0"] == (str(rows),)
    assert guards[f"{columns} != 7"] == (str(columns),)


def test_size_text_is_python():
    class Resized(nn.Module):
        def forward(self, x):
            return x.new_zeros(math.trunc(x.shape[0] * 1.5))

    program = torch.export.export(Resized(), (torch.ones(4),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    (x,) = program.graph.find_nodes(op="placeholder")
    (made,) = program.graph.output_node().all_input_nodes
    (length,), (other,) = x.meta["val"].shape, made.meta["val"].shape
    assert size_text(other) == f"math.trunc(1.5000000000000000*torch.sym_float({size_text(length)}))"


class Stop(BaseException):
    pass


def test_checking_sizes_may_end_a_trace():
    class Even(nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[0] % 2 == 0 else x

    def check():
        calls.append(1)
        if len(calls) in (1, 4):
            raise Stop

    shapes, x, calls = ({0: torch.export.Dim.AUTO},), torch.ones(4, 3), []
    for outcome in (pytest.raises(Stop), pytest.raises(Stop), contextlib.nullcontext()):
        with outcome, checking_sizes(check):
            torch.export.export(Even(), (x,), dynamic_shapes=shapes)
    seen = len(calls)
    assert seen > 5
    assert torch.equal(torch.export.export(Even(), (x,), dynamic_shapes=shapes).module()(x), x * 2)
    assert len(calls) == seen


def test_module_call():
    class Caller(nn.Module):
        def forward(self):
            return inspect.currentframe().f_back.f_code

    assert Caller()() is MODULE_CALL


def test_is_composed():
    assert is_composed(torch.ops.aten.type_as.default)
    assert not is_composed(torch.ops.aten.topk.default)
    assert not is_composed(torch.add)


def test_length_when():
    program = torch.export.export(Doubled(), (torch.randn(4, 3),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    size = program.graph.output_node().args[0][0].meta["val"].shape[0]
    assert length_when(size, {}) == 8
    assert length_when(size, {str(symbol): 3 for symbol in size.node.expr.free_symbols}) == 24
    assert length_when(5, {"s0": 3}) == 5


class Doubled(nn.Module):
    def forward(self, x):
        return torch.cat([x, x])


def test_without_modes():
    with FakeTensorMode(), without_modes():
        assert type(torch.zeros(2)) is torch.Tensor
    with FakeTensorMode():
        assert type(torch.zeros(2)) is not torch.Tensor


def test_call_attributes_of_a_module_and_of_a_compiled_one():
    module = nn.Linear(2, 2)
    assert not any(vars(module).get(name) for name in CALL_ATTRIBUTES)
    module.compile(backend="eager")
    assert [name for name in CALL_ATTRIBUTES if vars(module).get(name)] == [CALL_ATTRIBUTES[1]]
