import json
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.export.coreai import file, lowerings
from qtk.graph.graphs import roots
from tests.export.coreai.small_file import needs_converter, net, small


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.total += x.sum(0)
        return x * self.total


def test_buffers_that_forward_writes_are_refused_with_a_way_out(tmp_path):
    sim = qtk.QuantSim(Counting().eval(), torch.randn(4, 3), config="coreai")
    sim.compute_encodings([torch.randn(4, 3)], progress=False)
    with pytest.raises(ExportError, match=r"buffers that forward writes; .*states=.*formats=\('onnx',\)"):
        sim.export(tmp_path / "out", formats="coreai", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rule", "said"), [
    ({"output": {"bits": 16}}, ":out is .* codes of 8 bits at most"),
    ({"output": {"bits": 4}}, "is clamped to codes from -8 to 7, and Core AI clamps to all of int4"),
    ({"weight": {"granularity": "per_block", "block_size": 4}}, "weight is .* per tensor or per channel"),
])
def test_codes_that_core_ai_does_not_take_are_named_before_anything_is_converted(rule, said, tmp_path):
    x = torch.randn(8, 8)
    sim = qtk.QuantSim(nn.Linear(8, 4).eval(), x, config={
        "version": 1, "extends": "coreai", "rules": [{"match": {"op": "linear"}, **rule}]})
    sim.compute_encodings([x], progress=False)
    with pytest.raises(ExportError, match=said):
        sim.export(tmp_path / "out", formats="coreai", progress=False)


@needs_converter
def test_every_site_is_in_the_file_bit_for_bit():
    sim, _, folder = small()
    read, simulated = file.read(folder / "model.aimodel"), sim.encodings()
    assert read.keys() == simulated.keys()
    assert all(read[name].equals(encoding) for name, encoding in simulated.items())


@needs_converter
@pytest.mark.parametrize("planted", ["scale", "weight"])
def test_a_difference_from_the_simulation_is_found(planted):
    sim, x, folder = small()
    model = net()
    model.load_state_dict(sim.model.state_dict(), strict=False)
    other = qtk.QuantSim(model, x, config="coreai")
    other.compute_encodings([x], progress=False)
    file.compare_with_simulation(folder / "model.aimodel", roots(other.model)[""])
    if planted == "scale":
        encoding = other.encodings()["1:out"]
        other.quantizers["1:out"].load_encoding(replace(encoding, scale=encoding.scale * 1.0001))
    else:
        with torch.no_grad():
            dict(other.model.named_parameters())["4.weight"][0, 0] += 0.01
    with pytest.raises(ExportError, match="1:out: scale" if planted == "scale" else "4.weight: the stored integers"):
        file.compare_with_simulation(folder / "model.aimodel", roots(other.model)[""])


@needs_converter
def test_a_site_that_the_converter_changes_is_named_and_nothing_is_written(monkeypatch, tmp_path):
    def doubled(name, value, scale, *rest):
        return original(name, value, scale * 2, *rest)

    original = lowerings._operator
    monkeypatch.setattr(lowerings, "_operator", doubled)
    with pytest.raises(ExportError, match=r"0\.weight is not in the program that Core AI's converter wrote"):
        small()[0].export(tmp_path / "out", formats="coreai", progress=False)
    assert not (tmp_path / "out").exists()


@needs_converter
def test_the_target_is_in_the_file_and_another_file_is_refused(tmp_path):
    path = tmp_path / "model.aimodel"
    shutil.copytree(small()[2] / "model.aimodel", path)
    metadata = json.loads((path / "metadata.json").read_text())
    own = next(value for value in metadata.values() if isinstance(value, dict) and file.SITES in value)
    assert own["qtk.target"] == "coreai"
    del own[file.SITES]
    (path / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(ExportError, match=r"no metadata qtk\.sites.*formats=\('coreai',\)"):
        file.read(path)
