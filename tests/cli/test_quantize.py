"""Running recipes: what is measured, what is written, and what is left when it fails."""

import io
import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from qtk.atomic import MARKER, staged_directory
from qtk.cli import quantize as module
from qtk.cli.app import app
from qtk.cli.model_source import build_model
from qtk.cli.quantize import export, quantize
from qtk.cli.recipe import load_recipe
from qtk.errors import CalibrationError, ConfigError, ExportError, QtkError
from qtk.export import encodings_json
from qtk.runtimes.session import create_session

W8A8 = {"name": "w8a8", "weight_bits": 8, "activation_bits": 8}
W4 = {"name": "w4", "weight_bits": 4, "activation_bits": None}


def silent():
    return Console(file=io.StringIO())


def run(project, tmp_path, *, force=False, **changes):
    recipe = load_recipe(project.recipe(**changes))
    return quantize(recipe, tmp_path / "results", force=force, console=silent())


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")
                  if path.is_file() and path.name != MARKER)


@pytest.mark.medium
def test_every_model_is_measured_in_every_setting(project, tmp_path):
    models = [{"name": name, "model": f"{project.module}:net"} for name in ("one", "two")]
    summary = run(project, tmp_path, models=models, settings=[W8A8, W4])
    assert {model: list(scores) for model, scores in summary.models.items()} == {
        "one": ["fp32", "w8a8", "w4"], "two": ["fp32", "w8a8", "w4"]
    }
    scores = summary.models["one"]
    assert scores["fp32"].value == 1.0  # the labels are its own predictions
    assert scores["fp32"].size_bytes is None  # no ONNX file is asked for
    assert scores["w8a8"].sqnr_db > 25 > scores["w4"].sqnr_db > 5
    assert scores["w8a8"].onnxruntime_value is None
    assert summary.models["two"] == scores


@pytest.mark.medium
def test_layer_wise_steps_improve_a_setting(project, tmp_path):
    better = {**W4, "name": "better", "layerwise": ["seq_mse", "gptq", "bias_correction"]}
    scores = run(project, tmp_path, settings=[W4, better]).models["net"]
    assert scores["better"].sqnr_db > scores["w4"].sqnr_db + 2


@pytest.mark.medium
def test_a_page_to_look_at_lies_beside_the_exports(project, tmp_path):
    found = {**W4, "name": "found", "auto": {"max_drop": 1.0}}
    scores = run(project, tmp_path, settings=[W8A8, found], report=True).models["net"]
    text = (tmp_path / "results/net/w8a8/report.html").read_text(encoding="utf-8")
    assert "<h1>net w8a8</h1>" in text
    assert f"<b>{scores['w8a8'].value:.4g}</b><span>top1 on the evaluation data, 1 in float</span>" in text
    assert "of the calibration data (" in text
    assert "What was tried" not in text
    assert "What was tried" in (tmp_path / "results/net/found/report.html").read_text(encoding="utf-8")
    export(load_recipe(project.recipe(report=True)), tmp_path / "exported", force=False, console=silent())
    assert files_of(tmp_path / "exported") == ["net/w8a8/encodings.json", "net/w8a8/report.html"]


@pytest.mark.medium
def test_auto_finds_what_reaches_the_drop(project, tmp_path):
    rules = [{"match": {"op": "linear"}, "weight": {"scheme": "min_max"}}]
    low = {**W4, "weight_bits": 2, "config": {"version": 1, "extends": "default", "rules": rules}}
    auto = {**low, "name": "auto", "auto": {"max_drop": -1.0}}  # never reached, so that all is tried
    recipe, printed = load_recipe(project.recipe(settings=[low, auto])), io.StringIO()
    scores = quantize(recipe, tmp_path / "results", force=False, console=Console(file=printed, width=200)).models["net"]
    assert scores["auto"].sqnr_db > scores["w4"].sqnr_db + 2
    assert "drop of top1, at most -1 asked" in printed.getvalue()
    assert "auto: not reached, nothing else is left to try" in printed.getvalue()
    exported = [{**auto, "auto": {"max_drop": 100.0}}]
    printed = io.StringIO()
    export(load_recipe(project.recipe(settings=exported)), tmp_path / "exported", force=False,
           console=Console(file=printed, width=200))
    assert "drop of output error, at most 100 asked" in printed.getvalue()


@pytest.mark.medium
def test_transforms_run_in_order_before_calibration(project, tmp_path):
    names = ["equalize", "smooth_quant(alpha=0.5)", "fold_batch_norms"]
    recipe, printed = load_recipe(project.recipe(settings=[{**W8A8, "transforms": names}])), io.StringIO()
    quantize(recipe, tmp_path / "results", force=False, console=Console(file=printed, width=200))
    lines = printed.getvalue().splitlines()
    made = [line.removeprefix("net: w8a8: ") for line in lines if line.startswith("net: w8a8: ")]
    assert [line.partition(":")[0] for line in made] == ["equalize", "smooth_quant", "fold_batch_norms"]
    assert "1 applied" in made[0]
    assert made[2].endswith("the model has no batch norm to fold")
    assert lines.index("net: calibrating w8a8") > lines.index(f"net: w8a8: {made[-1]}")


@pytest.mark.medium
def test_encodings_of_a_file_are_kept_and_the_others_computed(project, tmp_path):
    run(project, tmp_path, settings=[W8A8])
    file = tmp_path / "results/net/w8a8/encodings.json"
    data = json.loads(file.read_text())
    record = data["encodings"]["first.weight"]
    record["scale"] = [2 * scale for scale in record["scale"]]
    data["encodings"] = {"first.weight": record}
    (project.folder / "known.json").write_text(json.dumps(data))
    printed, known = io.StringIO(), {**W8A8, "name": "known", "encodings": "known.json"}
    quantize(load_recipe(project.recipe(settings=[W8A8, known])), tmp_path / "again", force=False,
             console=Console(file=printed, width=200))
    one, other = (encodings_json.read(tmp_path / "again/net" / name / "encodings.json") for name in ("w8a8", "known"))
    assert other["first.weight"].scale.tolist() == record["scale"] != one["first.weight"].scale.tolist()
    assert other["second.weight"].equals(one["second.weight"])
    assert "known.json: 1 encodings loaded and frozen" in printed.getvalue()


def test_the_recipe_names_the_input_that_says_which_tokens_count(project, tmp_path):
    padded = f"{project.module}:padded"
    models = [{"name": "net", "model": f"{project.module}:padded_net"}]
    data = {"calibration": padded, "evaluation": padded, "valid": "mask"}
    summary = run(project, tmp_path, models=models, data=data)
    assert summary.models["net"]["w8a8"].sqnr_db > 30, "the padding of 1000, which is clipped, counted"
    (file,) = (tmp_path / "results" / "net" / "w8a8").rglob("encodings.json")
    largest = float(encodings_json.read(file)["relu:out"].maximum)
    assert largest == pytest.approx(5.0, rel=0.01), "the padding of 1000 counted"


@pytest.mark.medium
def test_the_results_are_files(project, tmp_path):
    summary = run(project, tmp_path, settings=[W8A8, W4])
    folder = tmp_path / "results"
    assert files_of(folder) == [
        "net/w4/encodings.json", "net/w8a8/encodings.json", "summary.json", "summary.txt"
    ]
    assert json.loads((folder / "summary.json").read_text()) == summary.to_json()
    assert "W8A8" in (folder / "summary.txt").read_text()
    assert set(encodings_json.read(folder / "net/w4/encodings.json")) == {"first.weight", "second.weight"}


@pytest.mark.medium
def test_the_exported_file_is_measured_in_onnxruntime(project, tmp_path):
    pytest.importorskip("onnxruntime")
    summary = run(project, tmp_path, settings=[W8A8, W4], exports=["onnx"], onnx_for=["w8a8"])
    score = summary.models["net"]["w8a8"]
    assert score.onnxruntime_agreement == 1.0
    assert score.onnxruntime_value == score.value
    assert summary.models["net"]["w4"].onnxruntime_value is None
    assert score.runtime.startswith("ONNX Runtime ")
    folder = tmp_path / "results"
    assert files_of(folder) == ["net/fp32/model.onnx", "net/w8a8/model.onnx", "summary.json", "summary.txt"]
    assert score.runtime in (folder / "summary.txt").read_text()
    for setting in ("fp32", "w8a8"):
        path = folder / "net" / setting / "model.onnx"
        assert summary.models["net"][setting].size_bytes == path.stat().st_size
    assert summary.models["net"]["w4"].size_bytes is None


@pytest.mark.medium
def test_the_file_in_float_computes_the_model(project, tmp_path):
    pytest.importorskip("onnxruntime")
    run(project, tmp_path, exports=["onnx"])
    batch = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    session, _ = create_session(tmp_path / "results" / "net" / "fp32" / "model.onnx", optimized=False)
    (scores,) = session.run(None, {"x": batch.numpy()})
    model = build_model(f"{project.module}:net")
    assert torch.allclose(torch.from_numpy(scores), model(batch), atol=1e-6)


def test_batches_without_a_length_are_counted_on_the_first_pass(project, tmp_path, monkeypatch):
    counts, outputs = [], module.outputs

    def counting(*arguments, num_batches, **named):
        counts.append(num_batches)
        return outputs(*arguments, num_batches=num_batches, **named)

    monkeypatch.setattr(module, "outputs", counting)
    run(project, tmp_path, exports=[])
    assert counts == [None, 2]


def test_a_users_measure_and_weights(project, tmp_path):
    path, _ = project.weights()
    models = [{"name": "net", "model": f"{project.module}:net", "weights": str(path), "input_shape": [4, 6]}]
    summary = run(project, tmp_path, models=models, evaluation=f"{project.module}:mean_confidence", exports=[])
    assert summary.metric == "mean_confidence"
    assert 0 < summary.models["net"]["fp32"].value < 1
    assert files_of(tmp_path / "results") == ["summary.json", "summary.txt"]


@pytest.mark.medium
def test_results_are_the_same_on_every_run(project, tmp_path):
    first = run(project, tmp_path)
    assert run(project, tmp_path, force=True) == first


@pytest.mark.medium
def test_the_seed_decides_random_weights(project, tmp_path):
    changes = {"models": [{"name": "net", "model": f"{project.module}:random_net"}],
               "evaluation": f"{project.module}:mean_confidence", "exports": []}
    values = [
        run(project, tmp_path, force=True, seed=seed, **changes).models["net"]["fp32"].value for seed in (3, 4, 3)
    ]
    assert values[0] == values[2] != values[1]


def test_an_existing_directory_is_kept_unless_forced(project, tmp_path):
    old = tmp_path / "results" / "old.txt"
    with staged_directory(old.parent) as folder:
        (folder / old.name).write_text("mine")
    with pytest.raises(ExportError, match="exists already"):
        run(project, tmp_path)
    assert files_of(tmp_path / "results") == ["old.txt"]
    run(project, tmp_path, force=True)
    assert "summary.json" in files_of(tmp_path / "results")
    assert not old.exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_failed_run_leaves_everything_as_it_was(project, tmp_path, force, monkeypatch):
    if force:
        with staged_directory(tmp_path / "results") as folder:
            (folder / "old.txt").write_text("mine")
    before = files_of(tmp_path)
    monkeypatch.setattr(module, "outputs_sqnr_db", lambda *args: pytest.fail("stop"))
    with pytest.raises(pytest.fail.Exception):
        run(project, tmp_path, force=force)
    assert set(files_of(tmp_path)) - set(before) <= {"project/recipe.yaml"} | {
        name for name in files_of(tmp_path) if "__pycache__" in name
    }


def test_batches_that_differ_between_passes_are_refused(project, tmp_path):
    data = {"calibration": f"{project.module}:calibration", "evaluation": f"{project.module}:shuffled"}
    with pytest.raises(ConfigError, match="gives other batches on each pass; turn shuffling"):
        run(project, tmp_path, data=data)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"evaluation": "missing"}, ConfigError, "evaluation: got 'missing'; must be module:callable"),
        ({"evaluation": "MODULE:text_measure"}, ConfigError, "text_measure: returned a str"),
        ({"data": {"calibration": "MODULE:calibration"}}, ConfigError, r"data\.evaluation: missing; .*qtk export"),
        ({"data": {"calibration": "MODULE:nothing", "evaluation": "MODULE:evaluation"}}, ConfigError, "gave no batch"),
        ({"data": {"calibration": "MODULE:evaluation", "evaluation": "MODULE:bare"}}, ConfigError, "must be a pair"),
    ],
)
def test_what_cannot_run_says_why(project, tmp_path, changes, error, said):
    text = json.dumps(changes).replace("MODULE", project.module)
    with pytest.raises(error, match=said):
        run(project, tmp_path, **json.loads(text))
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_calibration_without_an_end_is_refused_before_a_model_runs(project, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "build_model", lambda *args, **options: pytest.fail("a model was built"))
    data = {"calibration": f"{project.module}:endless", "evaluation": f"{project.module}:evaluation"}
    with pytest.raises(ConfigError, match=r"data\.calibration: .*:endless has no length .*data\.num_batches"):
        run(project, tmp_path, data=data)
    assert not (tmp_path / "results").exists()


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("verb", [quantize, export])
def test_the_end_of_a_calibration_is_looked_for_once_for_all_models(project, tmp_path, monkeypatch, verb):
    done, build = [], module.build_model
    monkeypatch.setattr(module.Batches, "require_end", lambda self: done.append("end"))
    monkeypatch.setattr(module, "build_model", lambda *args, **options: done.append("model") or build(*args, **options))
    models = [{"name": name, "model": f"{project.module}:net"} for name in ("first", "second")]
    verb(load_recipe(project.recipe(models=models)), tmp_path / "results", force=False, console=silent())
    assert done == ["end", "model", "model"]


@pytest.mark.medium
def test_endless_data_is_cut_at_the_number_of_batches(project, tmp_path):
    data = {"calibration": f"{project.module}:endless", "evaluation": f"{project.module}:endless",
            "num_batches": 2, "num_evaluation_batches": 3}
    setting = {"name": "w8a8", "transforms": ["smooth_quant"], "layerwise": ["bias_correction"]}
    assert run(project, tmp_path, data=data, settings=[setting]).models["net"]["w8a8"].value > 0.5


@pytest.mark.medium
def test_a_model_entry_excludes_modules(project, tmp_path):
    models = [{"name": "net", "model": f"{project.module}:net", "exclude": ["second"]}]
    run(project, tmp_path, models=models)
    sites = json.loads((tmp_path / "results" / "net" / "w8a8" / "encodings.json").read_text())["encodings"]
    assert [name for name in sites if name.startswith("first")]
    assert not [name for name in sites if name.startswith(("second", "act"))]
    with pytest.raises(ConfigError, match="exclude: no op runs in a module at path 'third'"):
        run(project, tmp_path / "again", models=[{**models[0], "exclude": "third"}])


def test_nan_in_the_calibration_data_names_site_and_batch(project, tmp_path):
    (project.folder / f"{project.module}_nan.py").write_text(
        "import torch\ndef batches():\n    return [(torch.zeros(2, 6), None), (torch.full((2, 6), torch.nan), None)]\n"
    )
    data = {"calibration": f"{project.module}_nan:batches", "evaluation": f"{project.module}:evaluation"}
    with pytest.raises(CalibrationError, match="batch 1: x:input: 12 NaN"):
        run(project, tmp_path, data=data)


@pytest.mark.medium
def test_export_writes_the_same_files_without_measuring(project, tmp_path):
    recipe = load_recipe(project.recipe(data={"calibration": f"{project.module}:calibration"}))
    export(recipe, tmp_path / "results", force=False, console=silent())
    assert files_of(tmp_path / "results") == ["net/w8a8/encodings.json"]
    run(project, tmp_path, force=True)
    assert files_of(tmp_path / "results")[0] == "net/w8a8/encodings.json"


def test_an_export_of_nothing_is_an_error(project, tmp_path):
    with pytest.raises(ConfigError, match="exports: is empty"):
        export(load_recipe(project.recipe(exports=[])), tmp_path / "results", force=False, console=silent())


def record(tmp_path):
    return json.loads((tmp_path / "results" / "summary.json").read_text())


@pytest.mark.medium
@pytest.mark.parametrize("metric", ["nan", "infinite"])
def test_a_metric_that_is_not_finite_is_null(project, tmp_path, metric):
    run(project, tmp_path, evaluation=f"{project.module}:{metric}")
    assert record(tmp_path)["models"]["net"]["w8a8"][metric] is None
    assert record(tmp_path)["models"]["net"]["w8a8"]["sqnr_db"] > 25


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("net", "sqnr"), [("class_net", False), ("partial_net", True)])
@pytest.mark.parametrize("exports", [["encodings_json"], ["onnx"]])
def test_outputs_that_are_integers_or_none_are_measured_as_far_as_they_can_be(project, tmp_path, net, sqnr, exports):
    models = [{"name": "net", "model": f"{project.module}:{net}"}]
    run(project, tmp_path, models=models, evaluation=f"{project.module}:one", exports=exports)
    score = record(tmp_path)["models"]["net"]["w8a8"]
    assert score["one"] == 1.0
    assert (score["sqnr_db"] is not None) is sqnr
    assert exports == ["encodings_json"] or score["onnxruntime_agreement"] == 1.0


@pytest.mark.medium
def test_a_failed_setting_does_not_take_the_others_with_it(project, tmp_path):
    bad = {**W4, "name": "bad", "layerwise": ["gptq"], "config": {"version": 1, "rules": [
        {"match": {"path": "no_such_layer"}, "weight": {"bits": 4}}]}}
    models = [{"name": name, "model": f"{project.module}:{of}"} for name, of in (("net", "net"), ("broken", "bad_net"))]
    summary = run(project, tmp_path, models=models, settings=[bad, W8A8, W4])
    assert list(summary.models["net"]) == ["fp32", "w8a8", "w4"]
    assert "no_such_layer" in summary.failures["net"]["bad"]
    found = record(tmp_path)["models"]
    assert "no_such_layer" in found["net"]["bad"]["error"]
    assert all("raised ValueError: no such weights" in found["broken"][name]["error"] for name in ("bad", "w8a8", "w4"))
    assert files_of(tmp_path / "results") == [
        "net/w4/encodings.json", "net/w8a8/encodings.json", "summary.json", "summary.txt"]
    assert "net bad failed: " in (tmp_path / "results" / "summary.txt").read_text()


@pytest.mark.medium
@pytest.mark.parametrize("force", [False, True])
def test_what_is_finished_is_there_when_the_run_is_stopped(project, tmp_path, force, monkeypatch):
    if force:
        with staged_directory(tmp_path / "results") as folder:
            (folder / "old.txt").write_text("old")
    real = module.outputs_sqnr_db
    calls = iter([real])

    def stopped(*outputs):
        return next(calls, lambda *args: pytest.fail("stop"))(*outputs)

    monkeypatch.setattr(module, "outputs_sqnr_db", stopped)
    with pytest.raises(pytest.fail.Exception):
        run(project, tmp_path, force=force, settings=[W8A8, W4])
    assert files_of(tmp_path / "results") == ["net/w8a8/encodings.json", "summary.json", "summary.txt"]
    assert list(record(tmp_path)["models"]["net"]) == ["fp32", "w8a8"]
    assert [path for path in tmp_path.iterdir() if path.name.endswith((".part", ".old"))] == []


@pytest.mark.medium
def test_an_exit_code_tells_of_a_failed_setting(project, tmp_path):
    rule = {"match": {"path": "nowhere"}, "weight": {"bits": 4}}
    bad = {**W4, "name": "bad", "config": {"version": 1, "rules": [rule]}}
    result = CliRunner().invoke(app, ["quantize", str(project.recipe(settings=[W8A8, bad]))])
    assert result.exit_code == 1
    assert "error: net bad failed: " in result.stderr
    assert "written to" in result.stdout


@pytest.mark.slow
def test_sequences_of_any_length_are_quantized_measured_and_exported(project, tmp_path):
    pytest.importorskip("onnxruntime")
    data = {key: f"{project.module}:sentences" for key in ("calibration", "evaluation")}
    model = {"name": "net", "model": f"{project.module}:token_net"}
    with pytest.raises(QtkError, match='dynamic_shapes="all"'):
        run(project, tmp_path, models=[model], data=data, exports=["onnx"])
    summary = run(project, tmp_path, models=[model | {"dynamic_shapes": "all"}], data=data, exports=["onnx"])
    assert not summary.failed()
    assert summary.models["net"]["w8a8"].onnxruntime_agreement == 1.0
