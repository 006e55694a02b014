"""The embedded models by name, with their trained weights."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

from safetensors.torch import load
from torch import nn

from qtk.demo.small_cnn import SmallCnn
from qtk.demo.small_gru import SmallGru
from qtk.demo.small_lstm import SmallLstm
from qtk.demo.small_vit import SmallViT
from qtk.registry import Registry

DEMO_MODELS: Registry[Callable[[], nn.Module]] = Registry("demo model")
DEMO_MODELS.add("digits_cnn", SmallCnn)
DEMO_MODELS.add("digits_vit", SmallViT)
DEMO_MODELS.add("digits_lstm", SmallLstm)
DEMO_MODELS.add("digits_gru", SmallGru)


def build(name: str) -> nn.Module:
    """The trained model called ``name``, in eval mode; it maps digits [N, 1, 8, 8] of 0…1 to scores [N, 10].

    Raises: ConfigError if there is no such model.

    >>> build("digits_cnn").training
    False
    """
    model = DEMO_MODELS[name]()
    model.load_state_dict(load((files("qtk.demo") / "weights" / f"{name}.safetensors").read_bytes()))
    return model.eval()


def digits_cnn() -> nn.Module:
    """The trained convolutional net."""
    return build("digits_cnn")


def digits_vit() -> nn.Module:
    """The trained vision transformer."""
    return build("digits_vit")


def digits_lstm() -> nn.Module:
    """The trained bidirectional LSTM."""
    return build("digits_lstm")


def digits_gru() -> nn.Module:
    """The trained GRU."""
    return build("digits_gru")
