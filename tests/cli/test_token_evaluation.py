"""Metrics of language models in recipes, against those of the verbs."""

import pytest
import torch

import qtk
from qtk.cli.evaluation import evaluation
from qtk.cli.token_evaluation import TOKEN_METRICS
from qtk.errors import ConfigError
from tests.cli.test_quantize import run

NET = """
from tests.workflow.language_model import LanguageModel, token_batch

def language_net():
    return LanguageModel()

def texts():
    batches = [token_batch(seed) for seed in (0, 1)]
    return [(batch, batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)) for batch in batches]
"""


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("metric", TOKEN_METRICS)
def test_a_recipe_measures_it(project, tmp_path, metric):
    from tests.workflow.language_model import LanguageModel, token_batch

    with (project.folder / f"{project.module}.py").open("a") as file:
        file.write(NET)
    texts = f"{project.module}:texts"
    low = {"name": "w3", "weight_bits": 3, "activation_bits": None}
    found = {**low, "name": "found", "auto": {"max_drop": 1e-6, "time_limit": 0.01}}
    scores = run(project, tmp_path, evaluation=metric, settings=[low, found],
                 models=[{"name": "net", "model": f"{project.module}:language_net"}],
                 data={"calibration": texts, "evaluation": texts}).models["net"]
    sim = qtk.QuantSim(LanguageModel().eval(), token_batch(0), weight_bits=3, activation_bits=None)
    sim.compute_encodings([token_batch(0)], progress=False)
    batches = [token_batch(0), token_batch(1)]
    if metric == "kl":
        assert scores["fp32"].value == 0.0
        expected = float(qtk.divergence(sim, batches, progress=False))
    else:
        expected = qtk.perplexity(sim, [right_padded(batch) for batch in batches], progress=False)
        assert scores["fp32"].value != pytest.approx(expected, rel=1e-3)
    assert scores["w3"].value == pytest.approx(expected, rel=1e-5)
    assert scores["found"].value == pytest.approx(expected, rel=1e-5)  # one trial, of plain calibration


def right_padded(batch):
    """A label counts though the position before it is padding on the left: this says so in a mask."""
    mask = batch["attention_mask"].clone()
    mask[1, 1] = 1
    return {**batch, "attention_mask": mask}


@pytest.mark.parametrize(("metric", "output", "label", "said"), [
    ("perplexity", torch.zeros(2, 3, 4), None, "perplexity needs the token ids"),
    ("perplexity", torch.zeros(2, 3, 4), torch.zeros(2, 3), r"got \(2, 3\)"),
    ("perplexity", torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.long), "the model must return logits"),
    ("perplexity", torch.zeros(2, 3, 4), torch.full((2, 3), -100), "perplexity: no token counts"),
    ("perplexity", torch.zeros(2, 3, 4), torch.full((2, 3), 4), "the token id 4 is none of the 4 numbers"),
    ("kl", torch.zeros(2, 3, 4), torch.full((2, 3), -100), "kl: no token counts"),
    ("kl", torch.zeros(2, 4), None, "the model must return logits"),
])
def test_what_has_no_such_metric(metric, output, label, said):
    with pytest.raises(ConfigError, match=said):
        evaluation(metric)([output], [label])


def test_less_is_better():
    assert not any(evaluation(name).higher_is_better for name in TOKEN_METRICS)
    assert evaluation("top1").higher_is_better
