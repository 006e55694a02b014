"""The names users give to layer-wise methods. To add one, add its line here."""

from __future__ import annotations

from qtk.layerwise.adaround import AdaptiveRounding
from qtk.layerwise.bias_correction import BiasCorrection
from qtk.layerwise.gptq import GptqRounding
from qtk.layerwise.layer_state import Step
from qtk.layerwise.seq_mse import SeqMse
from qtk.registry import Registry, configured

STEPS = Registry[Step]("layer-wise step")
STEPS.add("seq_mse", SeqMse())
STEPS.add("gptq", GptqRounding())
STEPS.add("adaround", AdaptiveRounding())
STEPS.add("bias_correction", BiasCorrection())


def step(text: str) -> Step:
    """The step of a name, with its settings changed where some are given.

    Raises: ConfigError if the name, or a setting, is unknown or makes no sense.

    >>> step("seq_mse(num_candidates=50)")
    SeqMse(num_candidates=50, refine=False, joint=False, exact=False, loss='mse')
    """
    return configured(STEPS, text, "gptq(act_order=False)")
