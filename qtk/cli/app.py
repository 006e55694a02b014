"""The command ``qtk``: quantize, export, compare, diff, inspect, verify, targets, build-kernels."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from qtk.cli import compare as comparison
from qtk.cli import diff as differing
from qtk.cli import folders
from qtk.cli import inspect as inspection
from qtk.cli import quantize as running
from qtk.cli import targets as targeting
from qtk.cli import verify as verification
from qtk.cli.console import progress_console, results_console, shows_bars
from qtk.cli.imported import search_path
from qtk.cli.recipe import Recipe, load_recipe
from qtk.config.files import shipped
from qtk.core.width import FROM_CONFIG
from qtk.errors import ConfigError, QtkError
from qtk.kernels.native_build import build as build_native
from qtk.report.summary import Summary
from qtk.workflow.verify_export import LatencyRequest

EMBEDDED = "digits"
FOLDER = "hf:"
"""How the argument begins that is a folder of weights, not a recipe."""

LEFT_OUT = "Left out: what the config says, else 8."

app = typer.Typer(
    name="qtk",
    help="Quantize PyTorch models, simulate the result exactly, export it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

FolderOrRecipe = Annotated[
    str | None,
    typer.Argument(metavar="RECIPE.yaml | hf:FOLDER", help="The recipe to run (left out: the embedded digits), or a "
                                                           "folder whose weights are quantized, file to file."),
]
RecipeFile = Annotated[
    Path | None,
    typer.Argument(metavar="RECIPE.yaml", help="The recipe to run; left out: the embedded digits."),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="The output directory; left out: the directory in the recipe."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output directory if it exists.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors alone, no progress bars.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where in the code an error arose.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"qtk {version('qtk')}, torch {version('torch')}")
        raise typer.Exit


@app.callback()
def versions(
    show: Annotated[
        bool, typer.Option("--version", help="Print the versions of qtk and torch.", callback=_print_version,
                           is_eager=True)
    ] = False,
) -> None:
    """Quantize PyTorch models, simulate the result exactly, export it."""


@app.command()
def quantize(
    recipe: FolderOrRecipe = None, output: Output = None,
    config: Annotated[str | None, typer.Option(help="For hf:FOLDER: a target of weights alone, or a file; left out: "
                                                    "vllm_w4a16.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="For hf:FOLDER: gptq or another layer-wise method. "
                                                          "Repeatable; left out: weights are rounded.")] = None,
    data: Annotated[str | None, typer.Option(help="For --method: module:callable that returns batches (inputs, label).")
                    ] = None,
    num_batches: Annotated[int | None, typer.Option(help="How many batches of the data; left out: all.")] = None,
    force: Force = False, quiet: Quiet = False, show_traceback: Traceback = False,
) -> None:
    """Run a recipe: quantize, measure, export, and measure the exported files. Or quantize a folder of weights."""
    progress = progress_console(quiet=quiet)
    if recipe is not None and recipe.startswith(FOLDER):
        with _errors(show_traceback=show_traceback), search_path(Path.cwd()):
            folders.quantize_folder(recipe.removeprefix(FOLDER), output, results_console(), config=config,
                                    methods=method or (), data=data, num_batches=num_batches, force=force,
                                    progress=shows_bars(progress))
        return
    with _session(None if recipe is None else Path(recipe), show_traceback=show_traceback) as (loaded, console):
        if config is not None or method or data is not None or num_batches is not None:
            raise ConfigError("--config, --method, --data and --num-batches go with hf:FOLDER; a recipe has its keys")
        directory = output or Path(loaded.output)
        summary = running.quantize(loaded, directory, force=force, console=progress)
        console.print(summary.table().rich())
        if runtimes := summary.runtimes():
            console.print(runtimes, markup=False, highlight=False)
        _end(summary, directory, console)


@app.command()
def export(
    recipe: RecipeFile = None, output: Output = None, force: Force = False, quiet: Quiet = False,
    show_traceback: Traceback = False,
) -> None:
    """Run a recipe without measuring anything: calibrate and write the files."""
    with _session(recipe, show_traceback=show_traceback) as (loaded, console):
        directory = output or Path(loaded.output)
        summary = running.export(loaded, directory, force=force, console=progress_console(quiet=quiet))
        _end(summary, directory, console)


@app.command()
def compare(
    recipe: RecipeFile = None,
    model: Annotated[list[str] | None, typer.Option(help="A model of the recipe; left out: all. Repeatable.")] = None,
    setting: Annotated[list[str] | None, typer.Option(help="A setting of it; left out: all. Repeatable.")] = None,
    simulation: Annotated[
        Path | None, typer.Option(help="A folder that sim.save wrote of the model; replaces the settings.")
    ] = None,
    top: Annotated[int | None, typer.Option(help="How many sites to show of each setting; left out: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Quiet = False,
    show_traceback: Traceback = False,
) -> None:
    """Calibrate a recipe's settings and show the error at every site against float, worst first."""
    with _session(recipe, show_traceback=show_traceback) as (loaded, console):
        comparison.compare(
            loaded, console, progress=progress_console(quiet=quiet), models=model or (), settings=setting or (),
            simulation=simulation, top=top, as_json=as_json,
        )


@app.command()
def diff(
    first: Annotated[
        Path, typer.Argument(metavar="A", help="A file, or a folder of sim.save, sim.export or qtk quantize.")
    ],
    second: Annotated[Path, typer.Argument(metavar="B", help="The other file or folder.")],
    data: Annotated[
        str | None, typer.Option(help="module:callable that returns batches (inputs, label), for the outputs.")
    ] = None,
    num_batches: Annotated[int | None, typer.Option(help="How many batches of the data; left out: all.")] = None,
    runtimes: Annotated[
        str | None, typer.Option(help="What runs file A, and what file B: two of onnxruntime-off, onnxruntime-on, "
                                      "openvino, with a comma between.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    show_traceback: Traceback = False,
) -> None:
    """Show what differs: encodings, weights, float parameters, outputs. The exit code is 1 if anything does."""
    with _errors(show_traceback=show_traceback), search_path(Path.cwd()):
        equal = differing.diff(first, second, results_console(), data=data, num_batches=num_batches, as_json=as_json,
                               runtimes=runtimes)
    if not equal:
        raise typer.Exit(1)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="timm:resnet18, torchvision:mobilenet_v2, demo:digits_cnn, "
                                              "or module:callable.")],
    weights: Annotated[str | None, typer.Option(help="A .safetensors or .pth file, or: pretrained.")] = None,
    input_shape: Annotated[
        list[str] | None,
        typer.Option(help="Once for each input: 1,3,224,224 or, with a dtype, 1,16:int64."),
    ] = None,
    config: Annotated[str, typer.Option(help="A shipped target, or a YAML or AIMET JSON file.")] = "default",
    weight_bits: Annotated[int | None, typer.Option(help=f"2 to 16; 0 keeps weights in float. {LEFT_OUT}")] = None,
    activation_bits: Annotated[
        int | None, typer.Option(help=f"2 to 16; 0 keeps activations in float. {LEFT_OUT}")
    ] = None,
    meta: Annotated[bool, typer.Option("--meta", help="Dry run: plan and memory, no tensor allocated.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Forecast instead: peak memory and time of runs on this machine.")
    ] = False,
    method: Annotated[list[str] | None, typer.Option(help="For --memory: a layer-wise method. Repeatable.")] = None,
    num_batches: Annotated[int, typer.Option(help="For --memory: batches of the input shape.")] = 64,
    show_traceback: Traceback = False,
) -> None:
    """Show how a model is captured, what would be quantized how, and what would stay in float."""
    with _errors(show_traceback=show_traceback), search_path(Path.cwd()):
        inspection.inspect(
            model,
            results_console(),
            weights=weights,
            input_shapes=input_shape or (),
            config=config,
            weight_bits=FROM_CONFIG if weight_bits is None else weight_bits or None,
            activation_bits=FROM_CONFIG if activation_bits is None else activation_bits or None,
            meta=meta,
            memory=memory,
            methods=method or (),
            num_batches=num_batches,
        )


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of sim.export or qtk quantize; a file.")],
    data: Annotated[
        str | None, typer.Option(help="module:callable that returns batches (inputs, label); left out: random values.")
    ] = None,
    num_batches: Annotated[int | None, typer.Option(help="How many batches of the data; left out: all.")] = None,
    float_export: Annotated[
        Path | None, typer.Option(help="The float export; left out: the folder fp32 next to DIR.")
    ] = None,
    runtime: Annotated[str, typer.Option(help="The runtime of the files: onnxruntime or openvino.")] = "onnxruntime",
    every: Annotated[
        bool, typer.Option("--all", help="Run all files in every installed runtime, and write certificate.json.")
    ] = False,
    certificate: Annotated[
        bool, typer.Option("--certificate", help="Run all files again and compare with certificate.json.")
    ] = False,
    turns: Annotated[int, typer.Option(help="Runs for the median latency; 0: not measured.")] = 30,
    batch_size: Annotated[int, typer.Option(help="Rows of a timed run.")] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of a timed run; left out: the runtime chooses.")] = None,
    valid: Annotated[
        list[str] | None, typer.Option(help="The input that says which tokens count: attention_mask. Repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Quiet = False,
    show_traceback: Traceback = False,
) -> None:
    """Run exported files in their runtimes: are they exact, in integers, fast? The exit code is 1 if not exact."""
    with _errors(show_traceback=show_traceback), search_path(Path.cwd()):
        progress = shows_bars(progress_console(quiet=quiet))
        if every or certificate:
            if every and certificate:
                raise ConfigError("--all writes certificate.json and --certificate checks it; give one of the two")
            if valid or float_export is not None or runtime != "onnxruntime":
                raise ConfigError("--all and --certificate run every installed runtime on all tokens, without a float "
                                  "export; leave out --valid, --float-export and --runtime")
            sound = verification.certify(
                directory, results_console(), data=data, num_batches=num_batches, checks=certificate,
                latency=LatencyRequest(turns, batch_size, threads), as_json=as_json, progress=progress,
            )
        else:
            sound = verification.verify(
                directory, results_console(), data=data, num_batches=num_batches, float_export=float_export,
                runtime=runtime, turns=turns, batch_size=batch_size, threads=threads, valid=valid or (),
                as_json=as_json, progress=progress,
            )
    if not sound:
        raise typer.Exit(1)


@app.command()
def targets(
    check: Annotated[
        Path | None, typer.Option("--check", metavar="FILE", help="An exported file, or a folder of sim.export.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The target with the rules; left out: the target that the file was exported for.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    show_traceback: Traceback = False,
) -> None:
    """List the shipped targets, or check a file against the rules of its runtime: exit code 1 if one is broken."""
    with _errors(show_traceback=show_traceback):
        if check is None:
            if target is not None or as_json:
                raise ConfigError("--target and --json go with --check FILE; name a file, or leave them out")
            targeting.list_targets(results_console())
            return
        kept = targeting.check(check, results_console(), target=target, as_json=as_json)
    if not kept:
        raise typer.Exit(1)


@app.command(name="build-kernels")
def build_kernels(show_traceback: Traceback = False) -> None:
    """Compile the C++ kernels of the CPU for the torch that is installed; it takes some minutes."""
    with _errors(show_traceback=show_traceback):
        results_console().print(f"written to {build_native()}", markup=False, highlight=False)


def main() -> None:
    """The console script."""
    app()


@contextmanager
def _session(recipe: Path | None, *, show_traceback: bool) -> Iterator[tuple[Recipe, Console]]:
    """The loaded recipe and a console; imports also search the recipe's folder, and errors end the command."""
    path = recipe or shipped("recipes", EMBEDDED)
    with _errors(show_traceback=show_traceback), search_path(Path.cwd(), path.resolve().parent):
        yield load_recipe(path), results_console()


@contextmanager
def _errors(*, show_traceback: bool) -> Iterator[None]:
    """Turns a ``QtkError`` into its message and exit code 1."""
    try:
        yield
    except QtkError as error:
        if show_traceback:
            typer.echo(traceback.format_exc(), err=True)
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _end(summary: Summary, directory: Path, console: Console) -> None:
    """Says where the results are, and what failed, which is exit code 1."""
    console.print(f"written to {directory}", markup=False, highlight=False)
    if failed := summary.failed():
        typer.echo(f"error: {failed}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
