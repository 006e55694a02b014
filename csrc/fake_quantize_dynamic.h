// qtk::fake_quantize_dynamic, as in qtk/ops/fake_quantize_dynamic.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace qtk {

using Dynamic = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // x̂, the scales and the zero points

Dynamic fake_quantize_dynamic_cpu(
    const at::Tensor& input, at::IntArrayRef block_size, int64_t qmin, int64_t qmax, bool symmetric);

}  // namespace qtk
