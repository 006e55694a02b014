"""Files of models with packed sequences in ONNX Runtime, against the simulation, which keeps them packed."""

import warnings

import onnx
import pytest
import torch
from torch.utils import _pytree as pytree

import qtk
from qtk.export.onnx.padded_sequences import batch_sizes_of, lengths_of, padded_to, repacked, unpacked
from tests.export.onnx.simulated import run_onnx, run_simulation
from tests.export.onnx.test_scan_over_time import assert_near, operators
from tests.zoo import packed
from tests.zoo.packed import sequences

LENGTHS = ([5, 2, 4], [1, 3], [4], [3, 3, 5, 1, 2])


def test_padding_packing_and_lengths_are_those_of_torch():
    x, lengths = sequences(4, lengths=[5, 3, 3, 1])
    x = x.transpose(0, 1)
    expected = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
    assert torch.equal(batch_sizes_of(lengths), expected.batch_sizes)
    assert torch.equal(lengths_of(expected.batch_sizes, 4), lengths)
    assert torch.equal(repacked(x, lengths), expected.data)
    for steps, value in ((5, 0.0), (7, -1.5)):
        wanted, _ = torch.nn.utils.rnn.pad_packed_sequence(expected, True, value, steps)
        again = unpacked(expected.data, expected.batch_sizes, 4)
        assert torch.equal(padded_to(again, lengths, True, value, steps), wanted)


def exported(model, inputs, folder, **options):
    torch.manual_seed(0)
    sim = qtk.QuantSim(model.eval(), inputs(LENGTHS[0], 0), **options)
    sim.compute_encodings([inputs(LENGTHS[0], 0), inputs(LENGTHS[3], 1)], progress=False)
    sim.export(folder / "out", formats=("onnx",))
    assert [path.name for path in (folder / "out").glob("*.onnx")] == ["model.onnx"]
    return sim, folder / "out" / "model.onnx"


def assert_file_is_simulation(sim, path, inputs, optimized=(False, True)):
    """Equal, but for single codes where a sum in another order falls to the other side of a tie."""
    for seed, lengths in enumerate(LENGTHS):
        leaves = pytree.tree_leaves(given := inputs(lengths, seed + 2))
        expected = run_simulation(sim.model, *given)
        for each in optimized:
            assert_near(run_onnx(path, *leaves, optimized=each), expected, sim)


def plain(lengths, seed):
    return sequences(seed=seed, lengths=lengths)


@pytest.mark.slow
@pytest.mark.medium
def test_a_quantized_net_in_both_directions_is_codes_up_to_the_head(tmp_path):
    sim, path = exported(packed.ToLongest(), plain, tmp_path)
    assert_file_is_simulation(sim, path, plain)
    graph = onnx.load(path).graph
    counts = operators(graph)
    assert (counts["Scan"], counts["TopK"]) == (2, 0)
    maker = {output: node for node in graph.node for output in node.output}
    (chosen,) = (node for node in graph.node if node.op_type == "Where")
    (reader,) = (node for node in graph.node if chosen.output[0] in node.input)
    assert reader.op_type == "DequantizeLinear"
    codes = maker[chosen.input[1]]
    while codes.op_type in ("Gather", "Concat", "Slice"):
        codes = maker[codes.input[0]]
    assert codes.op_type == "Scan"
    bodies = [attribute.g for node in graph.node for attribute in node.attribute if attribute.name == "body"]
    for body in bodies:
        made = {output: node.op_type for node in body.node for output in node.output}
        kept = [node for node in body.node if node.op_type == "Where"]
        assert [made[node.input[1]] for node in kept] == ["QuantizeLinear", "DequantizeLinear"]  # hidden state, cell


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "states", "gru"])
def test_packed_data_states_and_stacked_nets(name, tmp_path):
    if name == "data":
        model, inputs = packed.PackedData(), plain
    elif name == "gru":
        model, inputs = packed.ToLongest(kind=torch.nn.GRU, num_layers=2, tagger=False), plain
    else:
        model = packed.FirstStates(num_layers=2, proj_size=2, bidirectional=False)

        def inputs(lengths, seed):
            return *plain(lengths, seed), *packed.states(model.rnn, len(lengths), seed)

    sim, path = exported(model, inputs, tmp_path)
    assert_file_is_simulation(sim, path, inputs, optimized=[False])


@pytest.mark.medium
def test_calibration_sees_no_padding_inside_and_with_valid_none_before_either():
    torch.manual_seed(0)
    model = packed.SortedBefore(bidirectional=False).eval()
    lengths = torch.tensor([5, 2, 1])
    x = torch.randn(3, 5, packed.FEATURES)
    filled = torch.where(torch.arange(5)[:, None] < lengths[:, None, None], x, 1e3)
    sim = qtk.QuantSim(model, (x, lengths))

    def scales(given, valid=None):
        sim.compute_encodings([(given, lengths)], valid=valid, progress=False)
        return {name: encoding.scale for name, encoding in sim.encodings().items()}

    plain, padded = scales(x), scales(filled)
    assert {name for name, scale in plain.items() if not torch.equal(scale, padded[name])} == {"x:input"}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        masked = scales(filled, lambda batch: torch.arange(5) < batch[1][:, None])
    within = (torch.arange(5) < lengths[:, None]).unsqueeze(-1)
    low, high = torch.where(within, x, 0.0).min(), torch.where(within, x, 0.0).max()
    torch.testing.assert_close(masked["x:input"].squeeze(), (high - low) / 255)
    assert not any("rnn.l0" in str(each.message) for each in told if "cannot be followed" in str(each.message))
