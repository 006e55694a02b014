"""Top-1 agreement of exported digits models with their simulations, in ONNX Runtime on a CPU with VNNI and one without.

The second is Haswell, emulated by ``qemu-x86_64``, in ONNX Runtime's ordinary mode; the first is this machine, whatever
it has.

    python benchmarks/models/agreement_without_vnni.py
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build
from qtk.runtimes.session import create_session
from tests.export.onnx.without_vnni import run_without_vnni


def main() -> None:
    warnings.simplefilter("ignore")
    digits = load_digits_split()
    images = digits.test_images
    for name in ("digits_vit", "digits_cnn"):
        for config in ("onnxruntime", "onnxruntime_vnni", "default"):
            sim = qtk.QuantSim(build(name), images[:2], config=config)
            sim.compute_encodings(digits.train_images[:512].split(128), progress=False)
            with torch.no_grad():
                simulated = sim.model(images).argmax(-1).numpy()
            accuracy = float((simulated == digits.test_labels.numpy()).mean())
            with tempfile.TemporaryDirectory() as folder:
                sim.export(Path(folder) / "out", formats=["onnx"])
                file = Path(folder) / "out" / "model.onnx"
                session = create_session(file)[0]
                feed = {session.get_inputs()[0].name: images.numpy()}
                here = float((session.run(None, feed)[0].argmax(-1) == simulated).mean())
                without = float((run_without_vnni(file, **feed)[0].argmax(-1) == simulated).mean())
            print(f"{name} {config}: accuracy {accuracy:.2%}; agreement here {here:.2%}, without VNNI {without:.2%}")


if __name__ == "__main__":
    main()
