"""qtk: post-training quantization for PyTorch, simulated exactly and exported as simulated."""

from importlib import import_module
from typing import TYPE_CHECKING

from qtk.calibrators.scheme import SCHEMES
from qtk.capture.prepared_model import PreparedModel
from qtk.core.dtypes import QDtype, dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock, PerChannel, PerTensor, PerToken
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.core.width import FROM_CONFIG
from qtk.data.sequences import Sequences
from qtk.errors import QtkError
from qtk.kernels.backends import backends
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.quantsim import QuantSim
from qtk.workflow.prepare import prepare_model

__version__ = "0.1.0"

__all__ = [
    "EXPORTERS",
    "FROM_CONFIG",
    "METHODS",
    "SCHEMES",
    "TRANSFORMS",
    "BitAssignment",
    "DataReport",
    "Divergence",
    "Encoding",
    "LayerwiseOptions",
    "Mode",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "PerToken",
    "PreparedModel",
    "QDtype",
    "QatSchedule",
    "QtkError",
    "QuantPlan",
    "QuantSim",
    "QuantSpec",
    "QuantizationDiff",
    "Quantized",
    "Quantizer",
    "Sequences",
    "Site",
    "SitePlan",
    "TargetCheck",
    "apply_adaround",
    "apply_gptq",
    "apply_layerwise",
    "apply_reconstruction",
    "apply_seq_mse",
    "apply_smooth_quant",
    "assign_bits",
    "backends",
    "block_view",
    "check_target",
    "correct_bias",
    "diff",
    "distillation_loss",
    "divergence",
    "dtype",
    "equalize_model",
    "export_gguf",
    "fold_batch_norms",
    "perplexity",
    "prepare_model",
    "quantize",
    "quantize_checkpoint",
    "reestimate_batch_norms",
    "round_scales",
    "synthetic_batches",
]

_MODULE_OF = {
    "EXPORTERS": "qtk.workflow.export",
    "METHODS": "qtk.layerwise.methods",
    "TRANSFORMS": "qtk.workflow.transforms",
    "BitAssignment": "qtk.auto.bit_assignment",
    "Divergence": "qtk.report.divergence",
    "LayerwiseOptions": "qtk.layerwise.options",
    "DataReport": "qtk.report.data_report",
    "QatSchedule": "qtk.training.qat_schedule",
    "QuantizationDiff": "qtk.report.quantization_diff",
    "Quantized": "qtk.auto.quantize",
    "TargetCheck": "qtk.workflow.check_target",
    "apply_adaround": "qtk.workflow.layerwise_methods",
    "apply_reconstruction": "qtk.workflow.layerwise_methods",
    "apply_gptq": "qtk.workflow.layerwise_methods",
    "apply_layerwise": "qtk.workflow.layerwise",
    "apply_seq_mse": "qtk.workflow.layerwise_methods",
    "apply_smooth_quant": "qtk.workflow.smooth_quant",
    "assign_bits": "qtk.auto.assign_bits",
    "block_view": "qtk.workflow.block_view",
    "check_target": "qtk.workflow.check_target",
    "correct_bias": "qtk.workflow.layerwise_methods",
    "diff": "qtk.workflow.diff",
    "distillation_loss": "qtk.algorithms.distillation",
    "divergence": "qtk.analysis.divergence",
    "equalize_model": "qtk.workflow.equalize",
    "export_gguf": "qtk.workflow.export_gguf",
    "fold_batch_norms": "qtk.workflow.fold_batch_norms",
    "perplexity": "qtk.analysis.perplexity",
    "quantize": "qtk.auto.quantize",
    "quantize_checkpoint": "qtk.auto.quantize_checkpoint",
    "reestimate_batch_norms": "qtk.workflow.reestimate_batch_norms",
    "round_scales": "qtk.workflow.round_scales",
    "synthetic_batches": "qtk.data.synthetic_batches",
}
"""Public names beside the core, each with the module that is imported when the name is first used."""


if TYPE_CHECKING:
    from qtk.algorithms.distillation import distillation_loss
    from qtk.analysis.divergence import divergence
    from qtk.analysis.perplexity import perplexity
    from qtk.auto.assign_bits import assign_bits
    from qtk.auto.bit_assignment import BitAssignment
    from qtk.auto.quantize import Quantized, quantize
    from qtk.auto.quantize_checkpoint import quantize_checkpoint
    from qtk.data.synthetic_batches import synthetic_batches
    from qtk.layerwise.methods import METHODS
    from qtk.layerwise.options import LayerwiseOptions
    from qtk.report.data_report import DataReport
    from qtk.report.divergence import Divergence
    from qtk.report.quantization_diff import QuantizationDiff
    from qtk.training.qat_schedule import QatSchedule
    from qtk.workflow.block_view import block_view
    from qtk.workflow.check_target import TargetCheck, check_target
    from qtk.workflow.diff import diff
    from qtk.workflow.equalize import equalize_model
    from qtk.workflow.export import EXPORTERS
    from qtk.workflow.export_gguf import export_gguf
    from qtk.workflow.fold_batch_norms import fold_batch_norms
    from qtk.workflow.layerwise import apply_layerwise
    from qtk.workflow.layerwise_methods import (
        apply_adaround,
        apply_gptq,
        apply_reconstruction,
        apply_seq_mse,
        correct_bias,
    )
    from qtk.workflow.reestimate_batch_norms import reestimate_batch_norms
    from qtk.workflow.round_scales import round_scales
    from qtk.workflow.smooth_quant import apply_smooth_quant
    from qtk.workflow.transforms import TRANSFORMS
else:
    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'qtk' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
