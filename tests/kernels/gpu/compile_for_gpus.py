"""Compiles every Triton kernel for GPUs that are not there: run as a script, without Triton's interpreter.

The argument ``pairwise`` thins the matrix of targets, kernels, dtypes and shapes.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qtk.kernels.gpu import (
    candidate_errors,
    extremes,
    fake_quantize,
    fake_quantize_dynamic,
    feedback_rounding,
    statistics,
)
from qtk.kernels.gpu.launch import EXACTLY
from tests.pairwise import full, pairwise

TARGETS = {"cuda": GPUTarget("cuda", 90, 32), "hip": GPUTarget("hip", "gfx942", 64)}
NUMBERS = {"qmin": "fp32", "qmax": "fp32", "clipped_factor": "fp32", "largest": "fp32", "bound": "fp32"}


def signature(kernel: triton.JITFunction, kind: str, constants: dict) -> dict[str, str]:
    """Types of the arguments: pointers end in ``_at``."""
    parts = "*fp64" if kernel is candidate_errors.errors_kernel else "*fp32"
    own = {"x_at": f"*{kind}", "y_at": f"*{kind}", "g_at": f"*{kind}", "dx_at": f"*{kind}", "zero_at": "*i32",
           "tickets_at": "*i32", "counts_at": "*i64", "errors_at": "*fp64", "parts_at": parts}
    return {
        name: "constexpr" if name in constants else own.get(name, "*fp32" if name.endswith("_at") else
                                                            NUMBERS.get(name, "i32"))
        for name in kernel.arg_names
    }


def main() -> None:
    many, one = {"SCALES": 128, "REACH": 32}, {"SCALES": 1, "REACH": 4096}
    integers, floats = {"MANTISSA": -1, "SMALLEST": 0}, {"MANTISSA": 3, "SMALLEST": 121}
    kernels = [
        (fake_quantize.forward_kernel, {"ASYMMETRIC": True, "RESIDUAL": 0, **integers, **many}),
        (fake_quantize.forward_kernel, {"ASYMMETRIC": False, "RESIDUAL": 0, **floats, **many}),
        (fake_quantize.forward_kernel, {"ASYMMETRIC": True, "RESIDUAL": 8, **integers, **many}),
        (fake_quantize.forward_kernel, {"ASYMMETRIC": True, "RESIDUAL": 16, **integers, **many}),
        (fake_quantize.backward_kernel,
         {"ASYMMETRIC": True, "RESIDUAL": 0, "SUMS": True, "OF_ZERO": True, "PARTS": 32, **integers, **many}),
        (fake_quantize.backward_kernel,
         {"ASYMMETRIC": False, "RESIDUAL": 0, "SUMS": True, "OF_ZERO": False, "PARTS": 32, **floats, **many}),
        (fake_quantize.backward_kernel,
         {"ASYMMETRIC": False, "RESIDUAL": 8, "SUMS": False, "OF_ZERO": False, "PARTS": 32, **integers, **many}),
        (fake_quantize.backward_kernel,
         {"ASYMMETRIC": True, "RESIDUAL": 16, "SUMS": True, "OF_ZERO": True, "PARTS": 32, **integers, **many}),
        (fake_quantize_dynamic.rows_kernel, {"SYMMETRIC": False, "ROWS": 4, "WIDTH": 1024}),
        (fake_quantize_dynamic.given_extremes_kernel, {"SYMMETRIC": False, **many}),
        (statistics.min_max_kernel, {"PARTS": 32, **many}),
        (extremes.extremes_kernel, {"PARTS": 32, **many}),
        (statistics.histogram_kernel, {"SLOTS": 1024, **many}),
        (statistics.histogram_kernel, {"SLOTS": 1024, **one}),
        (candidate_errors.errors_kernel,
         {"ASYMMETRIC": True, "WEIGHTED": True, "SQUARED": True, "CLIPPED": True, "PARTS": 32, **many}),
        (candidate_errors.errors_kernel,
         {"ASYMMETRIC": False, "WEIGHTED": False, "SQUARED": False, "CLIPPED": False, "PARTS": 32, **many}),
        (feedback_rounding.feedback_kernel, {"ASYMMETRIC": True, "BACKWARDS": True, "ROWS": 16, "WIDTH": 128}),
    ]
    axes = TARGETS.items(), kernels, ("fp32", "bf16", "fp16"), (False, True), (False, True)
    rows = pairwise(axes) if sys.argv[1:] == ["pairwise"] else full(axes)
    for (name, target), (kernel, flags), kind, columns, alone in rows:
        constants = {**flags, "COLUMNS": columns, "FLAT": flags.get("SCALES") == 1 and not columns, "TAIL": False,
                     "SHIFT": 0, "LANES": 8}
        constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
        if alone:  # the launcher makes a constant of a number that is 1
            constants |= dict.fromkeys(("s1", "middle", "inner", "step2", "turns", "splits", "count"), 1)
            constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
        types = signature(kernel, kind, constants)
        if constants.get("RESIDUAL"):
            types["residual_at" if "residual_at" in types else "x_at"] = f"*i{constants['RESIDUAL']}"
        source = ASTSource(kernel, types, constants)
        made = triton.compile(source, target=target, options={"num_warps": 8, **EXACTLY})
        print(name, kernel.__name__, kind, "columns" if columns else "rows", sorted(made.asm))


if __name__ == "__main__":
    main()
