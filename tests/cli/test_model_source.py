"""Where models and weights come from."""

import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from qtk.cli.model_source import build_model, load_weights, usual_input_shape
from qtk.errors import ConfigError


def test_the_demo_models_are_trained_and_in_eval_mode():
    model = build_model("demo:digits_cnn")
    assert not model.training
    shape = usual_input_shape("demo:digits_cnn", model)
    assert model(torch.zeros(shape)).shape == (1, 10)


def test_a_users_model_has_no_usual_shape(project):
    model = build_model(f"{project.module}:net")
    assert isinstance(model, nn.Module)
    assert not model.training
    assert usual_input_shape(f"{project.module}:net", model) is None


def test_timm_and_torchvision_models_know_their_input():
    pytest.importorskip("timm")
    model = build_model("timm:test_resnet")
    assert usual_input_shape("timm:test_resnet", model) == (1, 3, 160, 160)
    pytest.importorskip("torchvision")
    assert usual_input_shape("torchvision:inception_v3", nn.Identity()) == (1, 3, 299, 299)
    assert isinstance(build_model("torchvision:squeezenet1_1"), nn.Module)


def test_pretrained_weights_are_asked_of_the_library(monkeypatch):
    timm = pytest.importorskip("timm")
    asked = {}
    monkeypatch.setattr(timm, "create_model", lambda name, **options: asked.update(options) or nn.Identity())
    build_model("timm:resnet18", weights="pretrained")
    assert asked == {"pretrained": True}
    build_model("timm:resnet18")
    assert asked == {"pretrained": False}


@pytest.mark.parametrize(
    ("spec", "weights", "said"),
    [
        ("timm:resnet81", None, "models.a: timm has no model 'resnet81'; did you mean 'resnet18'"),
        ("torchvision:mobilenet_v4", None, "torchvision has no model 'mobilenet_v4'; did you mean 'mobilenet_v2'"),
        ("demo:digits_cn", None, "unknown demo model 'digits_cn'; did you mean 'digits_cnn'"),
        ("digits_cn", None, "models.a: 'digits_cn' does not say where .*:callable; did you mean demo:digits_cnn"),
        ("qqqq", None, r"write timm:…, torchvision:…, demo:…, hf:… or module:callable$"),
        ("math:hypot", "pretrained", "weights: pretrained is for timm: and torchvision:"),
        ("collections:OrderedDict", None, r"OrderedDict\(\) returned a OrderedDict; it must return an nn.Module"),
    ],
)
def test_an_unknown_model_is_answered_with_the_nearest(spec, weights, said):
    with pytest.raises(ConfigError, match=said):
        build_model(spec, weights=weights, where="models.a")


@pytest.mark.parametrize("kind", ["safetensors", "pth", "checkpoint"])
def test_weights_are_loaded(project, tmp_path, kind):
    path, state = project.weights()
    if kind != "safetensors":
        path = tmp_path / "weights.pth"
        torch.save(state if kind == "pth" else {"state_dict": state, "epoch": 3}, path)
    model = build_model(f"{project.module}:net", weights=str(path))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_weights_of_another_model_are_listed(project):
    path, _ = project.weights(**{"second.weight": (5, 16), "third.weight": (2, 2)})
    with pytest.raises(ConfigError) as caught:
        build_model(f"{project.module}:net", weights=str(path))
    assert "second.weight: shape (5, 16) in the file, (4, 16) in the model" in str(caught.value)
    assert "unexpected: third.weight" in str(caught.value)
    with pytest.raises(ConfigError, match=r"missing: 0\.weight"):
        load_weights(nn.Sequential(nn.Linear(2, 2)), path)


class Exploit:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def test_nothing_but_tensors_is_unpickled(tmp_path):
    path = tmp_path / "evil.pth"
    path.write_bytes(pickle.dumps(Exploit(), protocol=2))
    with pytest.raises(ConfigError, match=r"evil\.pth: holds more than tensors, or is broken"):
        load_weights(nn.Linear(2, 2), path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("w.bin", b"", "must be a .safetensors file"),
        ("w.safetensors", b"abc", "not a safetensors file"),
        ("w.safetensors", None, "cannot be read: No such file"),
        ("w.pth", None, "cannot be read: No such file"),
        ("w.pt", b"", "holds more than tensors, or is broken; .*: EOFError"),
    ],
)
def test_files_that_hold_no_weights(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load_weights(nn.Linear(2, 2), tmp_path / name)


def test_a_file_without_a_state_dict(tmp_path):
    torch.save([torch.zeros(2)], tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="must hold a state_dict"):
        load_weights(nn.Linear(2, 2), tmp_path / "w.pth")


@pytest.mark.parametrize(("name", "written"), [
    ("resnet18", "timm:resnet18 or torchvision:resnet18"),
    ("squeezenet1_1", "torchvision:squeezenet1_1"),
    ("digits_cnn", "demo:digits_cnn"),
])
def test_a_name_without_its_library_is_answered_with_it(name, written):
    for library in ("timm", "torchvision"):
        pytest.importorskip(library)
    with pytest.raises(ConfigError, match=f"'{name}' does not say where the model is from; write {written}$"):
        build_model(name)


def test_a_name_that_no_library_has_is_a_wrong_locator():
    with pytest.raises(ConfigError, match="module:callable"):
        build_model("no_such_model_anywhere")


@pytest.fixture
def library(monkeypatch):
    """A package called transformers: a config has ``architectures``, a model is a Linear that lacks what it is told."""
    package = ModuleType("transformers")
    asked = {}

    class Base(nn.Linear):
        pass

    class Net(Base):
        lost, error = (), None

        @classmethod
        def from_pretrained(cls, folder, **options):
            asked.update(options, folder=folder)
            if cls.error is not None:
                raise cls.error
            return cls(2, 2).train(), {"missing_keys": set(cls.lost), "mismatched_keys": set()}

    package.Net, package.asked, package.architectures = Net, asked, ["Net"]
    package.PreTrainedModel, package.pipeline, package.Other = Base, print, nn.Linear
    package.AutoConfig = SimpleNamespace(
        from_pretrained=lambda folder, **options: SimpleNamespace(architectures=package.architectures))
    monkeypatch.setitem(sys.modules, "transformers", package)
    return package


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_a_folder_of_transformers_is_loaded_from_safetensors_alone(library, folder):
    model = build_model(f"hf:{folder}")
    assert isinstance(model, library.Net)
    assert not model.training
    assert library.asked == {"folder": folder, "use_safetensors": True, "output_loading_info": True,
                             "local_files_only": True, "trust_remote_code": False}
    assert usual_input_shape(f"hf:{folder}", model) is None


def test_a_folder_that_lacks_something_says_what(library, folder, tmp_path):
    library.Net.lost = ("head.weight",)
    with pytest.raises(ConfigError, match=r"^model: .*: these weights are missing in its files, .*: head.weight$"):
        build_model(f"hf:{folder}")
    library.architectures = ["Own", "pipeline", "Other"]
    with pytest.raises(ConfigError, match=r"the architectures \['Own', .*, and transformers has no model among them"):
        build_model(f"hf:{folder}")
    (folder / "model.safetensors").rename(folder / "model.bin")
    with pytest.raises(ConfigError, match=r"holds no \*.safetensors"):
        build_model(f"hf:{folder}")
    with pytest.raises(ConfigError, match=r"^a: 'none' is no folder with a config.json"):
        build_model("hf:none", where="a")


@pytest.mark.parametrize("error", [AttributeError, KeyError, TypeError, ValueError, OSError, ZeroDivisionError])
def test_a_folder_that_cannot_be_loaded_says_what_to_do(library, folder, error):
    library.Net.error = error("sizes")
    with pytest.raises(ConfigError, match=r"^model: .*: cannot be loaded: .*sizes.*; write the folder again with "):
        build_model(f"hf:{folder}")
    library.architectures = [3]
    with pytest.raises(ConfigError, match="cannot be loaded: TypeError"):
        build_model(f"hf:{folder}")


def test_a_folder_that_needs_another_package_names_it(library, folder):
    library.Net.error = ImportError("packed is required")
    with pytest.raises(ConfigError, match=r"not installed: .*packed is required; install it, or .* the float model"):
        build_model(f"hf:{folder}")
    library.Net.error = MemoryError()
    with pytest.raises(MemoryError):
        build_model(f"hf:{folder}")


def test_without_transformers_a_folder_says_what_to_install(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r'needs transformers, .* pip install "qtk\[hf\]"'):
        build_model(f"hf:{folder}")
