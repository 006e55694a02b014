from qtk.report.runtime_nodes import FloatNode, RuntimeNodes

FLOATS = (
    FloatNode("Gelu", "act", "no kernel", weighted=False),
    *(FloatNode("Gemm", f"fc{index}", "excluded", weighted=True) for index in range(4)),
    FloatNode("Gemm", "head", "float by rules", weighted=True),
)


def test_float_nodes_are_grouped_by_kind_and_reason_products_first():
    rows = RuntimeNodes({}, FLOATS).float_table().rows
    assert rows == (
        ("Gemm", "4", "fc0, fc1, fc2, …", "excluded"), ("Gemm", "1", "head", "float by rules"),
        ("Gelu", "1", "act", "no kernel"),
    )


def test_products_in_float_are_named():
    assert [node.op for node in RuntimeNodes({}, FLOATS).weighted_floats] == ["fc0", "fc1", "fc2", "fc3", "head"]
    assert RuntimeNodes().integers() == "none"


def test_each_node_is_in_the_record():
    record = RuntimeNodes({"QGemm": 2}, FLOATS[:1]).to_json()
    assert record == {"integer": {"QGemm": 2}, "float": [{"kind": "Gelu", "op": "act", "reason": "no kernel"}]}
