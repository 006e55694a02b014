from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qtk
from qtk.cli.recipe import load_recipe
from qtk.config.files import shipped
from qtk.demo import models
from qtk.demo.digits import calibration_batches, load_digits_split
from qtk.demo.models import DEMO_MODELS, build
from qtk.demo.train import top1
from qtk.errors import ConfigError
from qtk.numerics.error import sqnr_db
from tests.export.onnx.without_vnni import QEMU, run_without_vnni

FLOORS = {"digits_cnn": 0.98, "digits_vit": 0.95, "digits_lstm": 0.97, "digits_gru": 0.97}
FACTORIES = {
    "digits_cnn": models.digits_cnn,
    "digits_vit": models.digits_vit,
    "digits_lstm": models.digits_lstm,
    "digits_gru": models.digits_gru,
}
RECURRENT = ("digits_lstm", "digits_gru")


def test_every_model_is_tested() -> None:
    assert set(DEMO_MODELS) == set(FLOORS) == set(FACTORIES)


@pytest.mark.parametrize(("name", "floor"), FLOORS.items())
def test_accuracy(name: str, floor: float) -> None:
    pytest.importorskip("sklearn")
    split = load_digits_split()
    with torch.no_grad():
        scores = build(name)(split.test_images)
    assert scores.shape == (540, 10)
    assert float((scores.argmax(1) == split.test_labels).double().mean()) >= floor


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", DEMO_MODELS)
def test_eight_bits_keep_the_accuracy(name: str) -> None:
    pytest.importorskip("sklearn")
    split = load_digits_split()
    model = build(name)
    sim = qtk.QuantSim(model, split.train_images[:8], weight_bits=8, activation_bits=8)
    sim.compute_encodings((images for images, _ in calibration_batches()), progress=False)
    images, labels = split.test_images, split.test_labels
    assert abs(top1(sim.model, images, labels) - top1(model, images, labels)) <= 0.005
    with torch.no_grad():
        assert not torch.equal(sim.model(images), model(images))


@pytest.mark.slow
@pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64, of qemu-user, to emulate a CPU without VNNI")
@pytest.mark.parametrize("weight_bits", [8, 4])
@pytest.mark.parametrize("name", DEMO_MODELS)
def test_files_of_the_demo_agree_on_a_cpu_without_vnni(name: str, weight_bits: int, tmp_path: Path) -> None:
    """As ``make demo`` writes them, in ONNX Runtime's ordinary mode: the same class but for at most two images."""
    pytest.importorskip("sklearn")
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    images = load_digits_split().test_images
    recipe = load_recipe(shipped("recipes", "digits"))
    config = recipe.config_of(next(each for each in recipe.settings if each.weight_bits == weight_bits))
    sim = qtk.QuantSim(build(name), images[:8], weight_bits=weight_bits, activation_bits=8, config=config)
    sim.compute_encodings((batch for batch, _ in calibration_batches()), progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    file = tmp_path / "out" / "model.onnx"
    (scores,) = run_without_vnni(file, **{onnx.load(file).graph.input[0].name: images.numpy()})
    with torch.no_grad():
        simulated = sim.model(images)
    assert int((torch.from_numpy(scores).argmax(1) != simulated.argmax(1)).sum()) <= 2
    assert sqnr_db(simulated, torch.from_numpy(scores)) >= 35


@pytest.mark.parametrize("name", DEMO_MODELS)
def test_weights_are_small_and_readable_by_all(name: str) -> None:
    path = Path(models.__file__).parent / "weights" / f"{name}.safetensors"
    assert path.stat().st_size < (200_000 if name in RECURRENT else 300_000)
    assert path.stat().st_mode & 0o444 == 0o444


@pytest.mark.parametrize("name", DEMO_MODELS)
def test_build_is_fresh_and_in_eval_mode(name: str) -> None:
    first, second = build(name), build(name)
    assert not any(module.training for module in first.modules())
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(second.parameters()).abs().sum() > 0


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_build_the_models_of_their_name(name: str) -> None:
    ours, reference = FACTORIES[name]().state_dict(), build(name).state_dict()
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[key], reference[key]) for key in ours)


@pytest.mark.parametrize("name", DEMO_MODELS)
def test_an_image_is_scored_by_itself(name: str) -> None:
    """Alone as in a batch: no model mixes images."""
    model, images = build(name), torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        alone = torch.cat([model(image) for image in images.split(1)])
        torch.testing.assert_close(alone, model(images))


def test_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'digits_cnn'"):
        build("digit_cnn")
