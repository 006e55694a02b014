"""Forty one-line faults over all rooms, each of a kind that people make: a bound, an axis, a sign, a case left out.

They were picked by hand from a random sample of lines, before it was known which of them the suite finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One line made wrong: ``text``, which stands once in ``file``, becomes ``wrong``."""

    file: str
    text: str
    wrong: str

    @property
    def room(self) -> str:
        """The part of ``qtk/`` that the file is in; for other files its folder.

        >>> [Fault(file, "a", "b").room for file in ("qtk/graph/flow.py", "qtk/atomic.py", "csrc/extremes.cpp")]
        ['graph', 'qtk', 'csrc']
        """
        folder, *rest = Path(self.file).parts
        return rest[0] if folder == "qtk" and len(rest) > 1 else folder

    def __str__(self) -> str:
        return f"{self.file}: {self.text} → {self.wrong}"

    def planted(self, source: str) -> str:
        """The source with the fault. Raises: ValueError if the text stands there not once."""
        if source.count(self.text) != 1:
            raise ValueError(f"{self.file} holds {self.text!r} {source.count(self.text)} times; mend the line of "
                             "tests/planted/faults.py")
        return source.replace(self.text, self.wrong)


FAULTS = (
    Fault("qtk/algorithms/hessian_factor.py", "damping * diagonal.mean(-1, keepdim=True)", "damping * diagonal"),
    Fault("qtk/algorithms/smooth_quant.py", "alive = (inputs > 0) & (weights > 0)",
          "alive = (inputs > 0) | (weights > 0)"),
    Fault("qtk/auto/widths.py", "fixed += float(costs)", "fixed = float(costs)"),
    Fault("qtk/calibrators/entropy.py", "(divergence - chance) / total", "(divergence + chance) / total"),
    Fault("qtk/calibrators/percentile.py", "* self.quantile).ceil()", "* self.quantile).floor()"),
    Fault("qtk/capture/packed.py", "last = [state.index_select(1, back)", "last = [state.index_select(1, order)"),
    Fault("qtk/capture/recover.py", "and path and eps == owner.eps and all(", "and path and all("),
    Fault("qtk/calls/inputs.py", "isinstance(captured, (bool, int, float, str, type(None)))",
          "isinstance(captured, (bool, int, float, str))"),
    Fault("qtk/cli/quantize.py", "count = count if like is None else len(like.labels)", "count = count"),
    Fault("qtk/config/tensor_setting.py", '"block_size": None, "remainder": None} | changes',
          '"block_size": None} | changes'),
    Fault("qtk/config/aimet.py", 'return "float"\n        return {"bits": BIAS_BITS',
          'return None\n        return {"bits": BIAS_BITS'),
    Fault("qtk/core/encoding.py", "copy=True).reshape(", "copy=False).reshape("),
    Fault("qtk/demo/train.py", "if arguments.validate:", "if not arguments.validate:"),
    Fault("qtk/export/onnx/onnxruntime/pooled_codes.py",
          "reader.op_type in (\"Reshape\", \"Squeeze\", \"Identity\") and",
          "reader.op_type in (\"Reshape\", \"Squeeze\", \"Identity\") or"),
    Fault("qtk/aimet/schema_0_6_1.py", "steps = (1 << spec.dtype.bits) - 1", "steps = 1 << spec.dtype.bits"),
    Fault("qtk/export/free_axes.py", "sorted({*free_axes(before)} - {*free_axes(after)})",
          "sorted({*free_axes(before)} & {*free_axes(after)})"),
    Fault("qtk/export/onnx/onnxruntime/convolution_zeros.py",
          "len(node.inputs) < 3 or not codes_of(node).is_initializer():", "len(node.inputs) < 3:"),
    Fault("qtk/graph/masks.py", "if is_reader or (node in found and (row is None or _passes(node, flow))):",
          "if is_reader or row is None or _passes(node, flow):"),
    Fault("qtk/graph/flow.py", "bool(merged) and all(self.is_constant", "bool(merged) and any(self.is_constant"),
    Fault("qtk/kernels/gpu/extremes.py", "tl.where(is_known | (before < lowest), before, lowest)",
          "tl.where(before < lowest, before, lowest)"),
    Fault("qtk/kernels/gpu/division.py", "return fused(fused(-near, scale, x), inverse, near)",
          "return fused(x - near * scale, inverse, near)"),
    Fault("csrc/statistics_loops.cpp", "slot >= 0.0f && slot <", "slot > 0.0f && slot <"),
    Fault("qtk/layerwise/seq_mse.py", "+ offsets / self.num_candidates", "- offsets / (self.num_candidates + 1)"),
    Fault("qtk/layerwise/ranks.py",
          "sum_over_ranks(None if moments is None else moments.held_out, device, owner=owner)",
          "None if moments is None else moments.held_out"),
    Fault("qtk/layerwise/run.py", "is_short = moments.rows_of_all < max(", "is_short = moments.rows_of_all <= max("),
    Fault("qtk/nn/recurrent.py", "x = outputs[0] if directions == 1 else", "x = outputs[0] if directions >= 1 else"),
    Fault("qtk/numerics/clipping.py", "exponent - spec.dtype.mantissa_bits - 1)",
          "exponent - spec.dtype.mantissa_bits)"),
    Fault("qtk/numerics/scale_formats.py", "return (scale / channel_scale).round().clamp(1, 1 << bits)",
          "return (scale / channel_scale).round().clamp(0, 1 << bits)"),
    Fault("qtk/observers/row_sample.py", "first = -self.seen % self._every", "first = self.seen % self._every"),
    Fault("qtk/ops/decomposed.py", "inside = (code >= qmin) & (code <= qmax)",
          "inside = (code > qmin) & (code <= qmax)"),
    Fault("qtk/planning/plan_edges.py",
          "or (not stream.feeds.isdisjoint(row.names) and", "or (stream.feeds.isdisjoint(row.names) and"),
    Fault("qtk/planning/share_merges.py", "if not is_empty(port.value) and (along",
          "if port.value is not None and (along"),
    Fault("qtk/quantizers/quantizer.py", "            self._clear()\n            self._keep(encoding)",
          "            self._keep(encoding)"),
    Fault("qtk/report/sensitivities.py", 'f"{-row.recovery:+.2e}"', 'f"{row.recovery:+.2e}"'),
    Fault("qtk/transforms/absorb_bias.py", "torch.where(amount > LEAST * std, amount, 0.0)",
          "torch.where(amount > 0, amount, 0.0)"),
    Fault("qtk/transforms/channel_scale_step.py", "if label(node, OWNER) == owner}", "if label(node, OWNER) != owner}"),
    Fault("qtk/channels/weight_rules.py", "added.view(shape) if per_channel else added)", "added.view(shape))"),
    Fault("qtk/calibration/calibrate.py", "slack = encoding.scale / 2", "slack = encoding.scale"),
    Fault("qtk/workflow/compute_encodings.py", "except BaseException:", "except Exception:"),
    Fault("qtk/atomic.py", "if target.is_symlink() or (target.exists() and not target.is_dir()):",
          "if target.exists() and not target.is_dir():"),
)
