import functools

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError, CaptureError
from qtk.nn.device import device_of


def test_the_device_is_that_of_the_first_tensor_else_the_cpu():
    buffers = nn.Module()
    buffers.register_buffer("mean", torch.zeros(1, device="meta"))
    assert device_of(buffers).type == "meta"
    assert device_of(nn.Sequential(nn.ReLU(), nn.Linear(2, 2, device="meta"))).type == "meta"
    assert device_of(nn.Linear(2, 2)).type == device_of(nn.ReLU()).type == "cpu"


class Hook:
    """What accelerate's AlignDevicesHook does: weights come from a map before a call, and go to meta behind it."""

    def __init__(self, module):
        self.module, self.forward = module, module.forward
        self.weights = {name: value.detach() for name, value in module.named_parameters(recurse=False)}
        module._hf_hook, module._old_forward = self, module.forward
        self.send("meta")
        module.forward = functools.partial(self.call)

    def send(self, device):
        for name, value in self.weights.items():
            own = value if device != "meta" else value.to("meta")
            setattr(self.module, name, nn.Parameter(own, requires_grad=False))

    def call(self, *args):
        self.send("cpu")
        try:
            return self.forward(*args)
        finally:
            self.send("meta")

    def remove(self):
        self.send("cpu")
        self.module.forward = self.forward
        del self.module._hf_hook


@pytest.mark.parametrize("config", ["default", "weight_only_int4"])
def test_the_call_that_removes_the_hooks_is_named_with_the_parameters(config):
    model, x = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(4, 32)
    hooks = [Hook(model[0]), Hook(model[2])]
    with pytest.raises(CaptureError, match=r"0.weight, 0.bias, 2.weight and 1 others: on the meta device") as error:
        qtk.QuantSim(model, x, config=config)
    assert "hooks of 2 modules" in str(error.value)
    assert "accelerate.hooks.remove_hook_from_module(model, recurse=True)" in str(error.value)
    for hook in hooks:
        hook.remove()
    assert "0.weight" in qtk.QuantSim(model, x, config=config).quantizers


def test_hooks_without_weights_elsewhere_are_no_matter():
    model = nn.Sequential(nn.Linear(8, 4))
    model[0]._hf_hook = object()
    qtk.prepare_model(model.eval(), torch.randn(2, 8))


def test_parameters_without_values_are_named_with_how_to_load_them():
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)).eval()
    model[1].to("meta")
    with pytest.raises(CaptureError, match=r"1.weight, 1.bias: on the meta device, without values; load the model"):
        qtk.prepare_model(model, torch.randn(2, 8))
    with torch.device("meta"):
        sim = qtk.QuantSim(nn.Sequential(nn.Linear(8, 4)).eval(), torch.randn(2, 8))
    with pytest.raises(CalibrationError, match=r"0.weight, 0.bias: on the meta device.*device_map=None"):
        sim.compute_encodings([torch.randn(2, 8)], progress=False)
