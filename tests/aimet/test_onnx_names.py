import pytest

from qtk.aimet.onnx_names import is_movement, parse, sites_of


@pytest.mark.parametrize(
    ("name", "module", "op", "call", "output"),
    [
        ("/conv1/Conv_output_0", "conv1", "Conv", 0, 0),
        ("/layer1/layer1.0/conv1/Conv_output_0", "layer1.0.conv1", "Conv", 0, 0),
        ("/blocks/blocks.0/mlp/mlp.2/Gemm_output_0", "blocks.0.mlp.2", "Gemm", 0, 0),
        ("/a/a.b/a.b.c/Relu_3_output_0", "a.b.c", "Relu", 3, 0),
        ("/Split_output_1", "", "Split", 0, 1),
    ],
)
def test_names_of_torch_are_taken_apart(name, module, op, call, output):
    parsed = parse(name)
    assert (parsed.module, parsed.op, parsed.call, parsed.output) == (module, op, call, output)


@pytest.mark.parametrize("name", ["conv1.weight", "60", "t.1", "relu:out", "/Relu_output", "Relu_output_0", ""])
def test_other_names_are_not(name):
    assert parse(name) is None
    assert not is_movement(name)


def test_of_several_operators_in_a_module_each_is_its_own():
    known = ["block.add:out", "block.add_1:out", "block:out", "fc:out", "block.matmul:out"]
    names = ["/block/Add_output_0", "/block/Add_1_output_0", "/block/MatMul_output_0", "/fc/MatMul_output_0"]
    assert sites_of(names, known) == {
        "/block/Add_output_0": "block.add:out", "/block/Add_1_output_0": "block.add_1:out",
        "/block/MatMul_output_0": "block.matmul:out", "/fc/MatMul_output_0": "fc:out",
    }


def test_what_no_site_has_is_left_out():
    assert sites_of(["/gone/Relu_output_0", "/Erf_output_0", "x"], ["relu:out", "x"]) == {}


def test_two_kinds_of_operators_of_a_module_of_one_op_are_not_guessed_at():
    assert sites_of(["/act/Div_output_0", "/act/Mul_output_0"], ["act:out"]) == {}
