"""How exactly exported programs (``pt2e``) compute what was simulated, in a process without qtk.

Each model is simulated by the target ``default`` and exported; one process, in which qtk cannot be imported, loads and
runs all files. "equal" is the share of output values with the bits of the simulation, "most steps" the largest
difference in steps of the output's quantizer (of the largest output where it has none). Weights are random but those of
the digits models; ``--powers-of-two`` rounds all scales, with which the ops of a program round as the simulation does.

    python benchmarks/models/fidelity_of_programs.py
    python benchmarks/models/fidelity_of_programs.py --models zoo --powers-of-two
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))

import qtk
from qtk.calls.inputs import split_inputs
from qtk.demo.models import DEMO_MODELS
from qtk.demo.models import build as trained
from tests.export.test_pt2e import round_scales
from tests.zoo.models import ZOO

WITHOUT_QTK = """
import sys, torch, torch.ao.quantization.fx._decomposed
sys.modules["qtk"] = None  # any import of it fails
for folder in sys.argv[1:]:
    args, kwargs = torch.load(folder + "/inputs.pt")
    with torch.no_grad():
        result = torch.export.load(folder + "/export/model.pt2").module()(*args, **kwargs)
    leaves = [each for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
    torch.save(leaves, folder + "/found.pt")
"""
TIMM = ("resnet18", "mobilenetv2_100", "efficientnet_b0", "convnext_atto", "vit_tiny_patch16_224", "mixer_s32_224",
        "regnety_002")
TORCHVISION = ("shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5")


def models(groups: Sequence[str]) -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any, Any]]]]:
    """Name → a function that returns a model, its example inputs and inputs to compare on."""
    if "zoo" in groups:
        for name, entry in ZOO.items():
            yield name, lambda entry=entry: (entry.model(), entry.inputs(), entry.inputs(3 if entry.dynamic else 2))
    for name in DEMO_MODELS if "digits" in groups else ():
        yield name, partial(_images, partial(trained, name), (1, 8, 8))
    for name in TIMM if "vision" in groups else ():
        yield name, partial(_images, partial(timm.create_model, name), (3, 224, 224))
    for name in TORCHVISION if "vision" in groups else ():
        yield name, partial(_images, partial(getattr(torchvision.models, name), weights=None), (3, 224, 224))


def _images(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return build().eval(), torch.rand(2, *shape), torch.rand(4, *shape)


def export(folder: Path, model: nn.Module, example: Any, given: Any, *, powers_of_two: bool) -> dict[str, Any]:
    """Writes program and inputs. Returns: the simulated outputs, and the steps of the output's quantizers."""
    sim = qtk.QuantSim(model, example)
    sim.compute_encodings([example, given], progress=False)
    if powers_of_two:
        round_scales(sim)
    sim.export(folder / "export", formats=("pt2e",))
    args, kwargs = split_inputs(given)
    folder.mkdir(exist_ok=True)
    torch.save((args, kwargs), folder / "inputs.pt")
    with torch.no_grad():
        result = sim.model.eval()(*args, **kwargs)
    steps = [each.encoding.scale.max() for name, each in sim.quantizers.items()
             if each.encoding is not None and not name.endswith(("weight", "bias"))]
    leaves = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
    return {"outputs": leaves, "step": float(steps[-1]) if steps else 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["zoo", "digits", "vision"], choices=("zoo", "digits", "vision"))
    parser.add_argument("--powers-of-two", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table(title="programs in a process without qtk, against the simulation", title_justify="left")
    for heading in ("model", "equal", "most steps"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    with tempfile.TemporaryDirectory() as temporary:
        expected, failed = {}, []
        for name, make in tqdm(list(models(arguments.models)), unit="model"):
            folder = Path(temporary) / name
            folder.mkdir()
            try:
                expected[name] = export(folder, *make(), powers_of_two=arguments.powers_of_two)
                if not (folder / "export" / "model.pt2").is_file():
                    failed.append(f"{name}: a file for each island")
                    del expected[name]
            except qtk.errors.ExportError as error:
                failed.append(f"{name}: {error}")
        folders = [str(Path(temporary) / name) for name in expected]
        subprocess.run([sys.executable, "-c", WITHOUT_QTK, *folders], check=True, cwd=temporary)
        exact = 0
        for name, each in expected.items():
            found = torch.load(Path(temporary) / name / "found.pt")
            pairs = list(zip(each["outputs"], found, strict=True))
            equal = sum(int(((a == b) | (a.isnan() & b.isnan())).sum()) for a, b in pairs)
            total = sum(a.numel() for a, _ in pairs)
            most = max(float((a.double() - b.double()).abs().nan_to_num().max()) for a, b in pairs if a.numel())
            exact += equal == total
            table.add_row(name, f"{equal / total:.2%}", f"{most / each['step']:.2f}")
    console = Console(width=120)
    console.print(table)
    console.print(f"{exact} of {len(expected)} equal bit for bit", *failed, sep="\n")


if __name__ == "__main__":
    main()
