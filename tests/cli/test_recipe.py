"""Recipes: what they hold and how mistakes in them are answered."""

import pytest

from qtk.cli.recipe import load_recipe
from qtk.config.files import shipped, shipped_names
from qtk.core.width import FROM_CONFIG
from qtk.errors import ConfigError


@pytest.mark.medium
@pytest.mark.parametrize("name", shipped_names("recipes"))
def test_shipped_recipes_are_sound(name):
    assert load_recipe(shipped("recipes", name)) == load_recipe(str(shipped("recipes", name)))


def test_the_embedded_recipe_is_what_the_demo_promises():
    recipe = load_recipe(shipped("recipes", "digits"))
    assert [model.name for model in recipe.models] == ["digits_cnn", "digits_vit", "digits_lstm", "digits_gru"]
    assert [(s.name, s.weight_bits, s.activation_bits) for s in recipe.settings] == [
        ("w8a8", 8, 8), ("w4a8", 4, 8), ("auto", 4, 4)]
    assert recipe.config == "onnxruntime"
    assert all("onnx" in recipe.formats_of(setting) for setting in recipe.settings)


def test_what_may_be_left_out(project):
    recipe = load_recipe(project.recipe(exports=None, output=None))
    assert (recipe.scheme, recipe.config, recipe.evaluation, recipe.seed) == ("min_max", "default", "top1", 0)
    assert recipe.formats_of(recipe.settings[0]) == ("encodings", "onnx")
    assert recipe.output == "qtk-output"


def test_files_are_looked_for_beside_the_recipe(project):
    weights, _ = project.weights()
    (project.folder / "mine.yaml").write_text("version: 1\n")
    models = [{"name": "net", "model": f"{project.module}:net", "weights": "weights.safetensors"}]
    settings = [{"name": "a", "weight_bits": 8, "activation_bits": None, "config": "mine.yaml"}]
    recipe = load_recipe(project.recipe(models=models, settings=settings, config="onnxruntime"))
    assert recipe.models[0].weights == str(weights)
    assert recipe.config_of(recipe.settings[0]).rules == ()
    assert recipe.config == "onnxruntime"


def test_a_setting_may_have_its_own_scheme_and_config(project):
    settings = [
        {"name": "a", "weight_bits": 8, "activation_bits": 8},
        {"name": "b", "weight_bits": 8, "activation_bits": 8, "scheme": "moving_average",
         "config": {"version": 1, "io": {"inputs": "float"}}},
    ]
    recipe = load_recipe(project.recipe(settings=settings))
    assert [recipe.scheme_of(setting) for setting in recipe.settings] == ["min_max", "moving_average"]
    assert [recipe.config_of(setting).io.inputs for setting in recipe.settings] == ["quantized", "float"]


def test_onnx_is_written_for_the_settings_named(project):
    settings = [{"name": name, "weight_bits": 8, "activation_bits": 8} for name in ("a", "b")]
    recipe = load_recipe(project.recipe(settings=settings, exports=["encodings", "onnx"], onnx_for=["b"]))
    assert [recipe.formats_of(setting) for setting in recipe.settings] == [("encodings",), ("encodings", "onnx")]


SETTING = {"name": "a", "weight_bits": 8, "activation_bits": 8}


def test_widths_left_out_are_those_of_the_config(project):
    recipe = load_recipe(project.recipe(settings=[{"name": "a"}, {"name": "b", "weight_bits": None}]))
    assert [(s.weight_bits, s.activation_bits) for s in recipe.settings] == [
        (FROM_CONFIG, FROM_CONFIG), (None, FROM_CONFIG),
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": []}, r"recipe\.yaml: model: unknown key; did you mean 'models'"),
        ({"models": []}, r"models: got \[\]; needs at least 1"),
        ({"models": [{"name": "a/b", "model": "x:y"}]}, r"models\[0\]\.name: got 'a/b'"),
        ({"models": [{"name": "..", "model": "x:y"}]}, r"models\[0\]\.name: got '\.\.'"),
        ({"models": [{"name": "a", "modle": "x:y"}]}, r"models\[0\]\.modle: unknown key; did you mean 'model'"),
        ({"models": [{"name": "a", "model": "x:y"}] * 2}, "models: the name 'a' appears twice"),
        ({"data": {"evaluation": "x:y"}}, r"data\.calibration: missing"),
        ({"settings": [{**SETTING, "weight_bits": 1}]}, r"settings\[0\]\.weight_bits: got 1; must be at least 2"),
        ({"settings": [SETTING, SETTING]}, "settings: the name 'a' appears twice"),
        ({"settings": [{**SETTING, "name": "fp32"}]}, "settings: 'fp32' is the model in float"),
        ({"settings": [{**SETTING, "weight_bits": "eight"}]},
         r"settings\[0\]\.weight_bits: got 'eight'; must be a number of bits, null for float, or from_config"),
        ({"settings": [{**SETTING, "name": "../evil"}]}, r"settings\[0\]\.name: got '\.\./evil'; must match \^"),
        ({"config": {"version": 1, "defaults": {"weight": {"bits": 4}}}}, "says 4 bits, weight_bits=8 was given"),
        ({"settings": [{**SETTING, "scheme": "mimmax"}]}, "unknown scheme 'mimmax'; did you mean 'min_max'"),
        ({"settings": [{**SETTING, "transforms": ["smoothquant"]}]}, "'smoothquant'; did you mean 'smooth_quant'"),
        ({"settings": [{**SETTING, "transforms": ["smooth_quant(alpha=2.0)"]}]}, "alpha must be a number from 0 to 1"),
        ({"settings": [{**SETTING, "layerwise": ["gtpq"]}]}, "unknown layer-wise method 'gtpq'; did you mean 'gptq'"),
        ({"settings": [{**SETTING, "layerwise": ["gptq(damp=1.0)"]}]}, "setting 'damp'; did you mean 'damping'"),
        ({"scheme": "min-max"}, r"recipe\.yaml: unknown scheme 'min-max'; did you mean 'min_max'"),
        ({"config": "defalt"}, "config 'defalt' is neither a file nor shipped with qtk; did you mean 'default'"),
        ({"config": {"version": 1, "rules": [{"match": {"op": "conv4d"}, "weight": "float"}]}},
         r"rules\[0\]\.match\.op: .* 'conv4d'"),
        ({"config": {"version": 1, "defaults": {"weight": {"scheme": "msee"}}}}, "scheme: unknown scheme 'msee'"),
        ({"settings": [{"name": "a", "encodings": "gone.json"}]}, r"a: encodings: gone\.json does not exist"),
        ({"exports": ["onx"]}, "unknown export format 'onx'; did you mean 'onnx'"),
        ({"onnx_for": ["w8a9"]}, "onnx_for: no setting is called 'w8a9'; did you mean 'w8a8'"),
        ({"data": {"calibration": "x:y", "num_batches": 0}}, r"data\.num_batches: got 0; must be at least 1"),
        ({"data": {"calibration": "x:y", "num_batches": 1.5}}, r"data\.num_batches: got 1\.5"),
        ({"data": {"calibration": "x:y", "num_evaluation_batches": "all"}}, r"num_evaluation_batches: got 'all'"),
        ({"models": [{"name": "a", "model": "x:y", "exclude": [""]}]}, r"models\[0\]\.exclude\[0\]"),
        ({"seed": 2**64}, "seed: got 18446744073709551616; must be at most"),
        ({"seed": "x"}, "seed: got 'x'; must be a valid integer"),
    ],
)
def test_a_mistake_is_answered_before_anything_runs(project, changes, said):
    with pytest.raises(ConfigError, match=said):
        load_recipe(project.recipe(**changes))


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"recipe .*absent\.yaml does not exist"):
        load_recipe(tmp_path / "absent.yaml")


@pytest.mark.parametrize("shape", [[-1, 6], [0, 6], [2.5, 6], [True, 6], ["2", 6], []])
def test_an_input_shape_has_positive_sizes(project, shape):
    models = [{"name": "net", "model": f"{project.module}:net", "input_shape": shape}]
    with pytest.raises(ConfigError, match=r"models\[0\]\.input_shape"):
        load_recipe(project.recipe(models=models))


@pytest.mark.parametrize("name", ["summary.json", "Summary.TXT"])
def test_a_model_is_not_called_as_a_file_of_the_results(project, name):
    with pytest.raises(ConfigError, match=f"'{name}' is a file of the results; choose another name"):
        load_recipe(project.recipe(models=[{"name": name, "model": f"{project.module}:net"}]))


@pytest.mark.parametrize("name", ["a" * 81, "a\n", "../a", "", ".a", "a/b", "a\0"])
def test_a_name_is_one_of_a_folder(project, name):
    for key, entry in (("models", {"name": name, "model": f"{project.module}:net"}), ("settings", {"name": name})):
        with pytest.raises(ConfigError, match=rf"{key}\[0\]\.name"):
            load_recipe(project.recipe(**{key: [entry]}))


def test_shapes_that_may_vary_are_a_key_of_the_model(project):
    models = [{"name": "net", "model": f"{project.module}:net"},
              {"name": "free", "model": f"{project.module}:net", "dynamic_shapes": "all"}]
    assert [model.dynamic_shapes for model in load_recipe(project.recipe(models=models)).models] == ["batch", "all"]
    with pytest.raises(ConfigError, match=r"models\[0\].dynamic_shapes: got 'some'"):
        load_recipe(project.recipe(models=[models[0] | {"dynamic_shapes": "some"}]))
