"""2:4 masks of digits_vit at W4A8: that of the smallest weights, which methods keep, and that chosen in the walk.

    python benchmarks/models/prune_digits.py

Calibrated with 512 training images; top-1 of the test images, and the share of groups of four with more than two
weights that are not 0, of the layers with an input axis of a multiple of four.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import qtk
from qtk.demo.digits import calibration_batches, load_digits_split
from qtk.demo.models import build

METHODS = (("gptq",), ("seq_mse", "coordinate_descent"), ("seq_mse", "adaround"))


def pruned(model: nn.Module) -> nn.Module:
    """Changes the model: two of four weights, those of least magnitude, become 0."""
    for weight in linear_weights(model).values():
        fours = weight.data.view(-1, 4)
        fours.scatter_(-1, fours.abs().argsort(-1)[..., :2], 0)
    return model


def linear_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.ndim == 2 and not each.shape[1] % 4}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    split, batches = load_digits_split(), [images for images, _ in calibration_batches()]
    for kind in ("smallest weights", "chosen in the walk"):
        model = build("digits_vit")
        if kind == "smallest weights":
            pruned(model)
        options = qtk.LayerwiseOptions(sparsity=None if kind == "smallest weights" else "2:4")
        for methods in METHODS:
            sim = qtk.QuantSim(model, batches[0], scheme="mse", weight_bits=4, activation_bits=8)
            sim.compute_encodings(batches, progress=False)
            qtk.apply_layerwise(sim, batches, methods, options=options, progress=False)
            with torch.no_grad():
                hits = [(each(split.test_images).argmax(1) == split.test_labels).double().mean()
                        for each in (model, sim.model)]
                weights = [sim.quantizers[name](weight) for name, weight in linear_weights(sim.model).items()]
            broken = torch.cat([(weight.reshape(-1, 4) != 0).sum(-1) > 2 for weight in weights]).double().mean()
            print(f"{kind}, {' + '.join(methods)}: float {hits[0]:.2%}, W4A8 {hits[1]:.2%}, {broken:.2%} of groups "
                  "broken", flush=True)


if __name__ == "__main__":
    main()
