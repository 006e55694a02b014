// qtk::fake_quantize and its gradient, as in qtk/ops/fake_quantize.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace qtk {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // of the input, the scale and the zero point

Tensor fake_quantize_cpu(
    const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point, at::IntArrayRef block_size,
    int64_t qmin, int64_t qmax);

Gradients fake_quantize_backward_cpu(
    const Tensor& grad, const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point,
    at::IntArrayRef block_size, int64_t qmin, int64_t qmax, bool wants_scale, bool wants_zero_point);

}  // namespace qtk
