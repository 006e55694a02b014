import torch
from torch import nn

import qtk
from qtk.runtimes.onnx_reference import OnnxReference
from qtk.runtimes.reference_file import InputTensor


def test_it_computes_what_onnx_defines_with_the_sites(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(5, 6)
    sim = qtk.QuantSim(model, x)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats="onnx")
    reference = OnnxReference(tmp_path / "out" / "model.onnx")
    (output,), sites = reference.values({"input": x})
    with torch.no_grad():
        assert torch.equal(output, sim.model(x))
    assert ("1:out", 0) in sites
    assert reference.inputs == [InputTensor("input", (None, 6), torch.float32)]
    assert [each.equals(reference.encodings["2:out"]) for each in reference.output_encodings] == [True]
