from qtk.export.quantized_file import FileOp, QuantizedFile


def test_ops_are_found_by_any_of_their_kinds():
    ops = FileOp("a", "Conv", ("conv2d", "conv")), FileOp("b", "Gemm", ("linear",))
    file = QuantizedFile("onnx", None, 19, (), ops)
    assert [op.name for op in file.ops_of(("conv", "add"))] == ["a"]
    assert [op.name for op in file.ops_of(("linear", "conv2d"))] == ["a", "b"]
    assert not list(file.ops_of(()))
