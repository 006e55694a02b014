"""Real architectures, as small as they can be built; the whole families were captured once, by hand."""

import pytest
import timm
import torch
import torchvision

from qtk.workflow.prepare import prepare_model
from tests.zoo.prepared import slow_but

TIMM = {
    "resnet18": {"block": timm.models.resnet.BasicBlock, "layers": [1, 1, 1, 1]},
    "mobilenetv3_small_050": {},
    "regnetx_002": {},
    "convnext_atto": {"depths": (1, 1, 1, 1)},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "deit_tiny_distilled_patch16_224": {"img_size": 64, "depth": 1},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4, "depths": (1, 2, 1), "num_heads": (3, 6, 12)},
    "mixer_s32_224": {"img_size": 64},
}
TORCHVISION = {"squeezenet1_1": {}, "shufflenet_v2_x0_5": {}, "googlenet": {"init_weights": False}}


def assert_captured(model, *, trains=True):
    torch.manual_seed(0)
    model.eval()
    prepared = prepare_model(model, torch.randn(1, 3, 64, 64))
    assert (prepared.report.rung, prepared.report.dynamic) == ("export", True)
    assert prepared.report.unknown_ops == ()
    assert prepared.report.eval_difference == 0.0
    assert (prepared.report.train_difference is not None) == trains
    assert list(prepared.state_dict()) == list(model.state_dict())
    other = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(prepared(other), model(other))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", slow_but(TIMM, "mobilenetv3_small_050", "vit_tiny_patch16_224"))
def test_timm(name):
    assert_captured(timm.create_model(name, **TIMM[name]))


@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(TORCHVISION, "squeezenet1_1"))
def test_torchvision(name):
    model = torchvision.models.get_model(name, weights=None, **TORCHVISION[name])
    assert_captured(model, trains=name != "googlenet")  # which returns other outputs in train mode
