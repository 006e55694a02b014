// qtk::fake_quantize, qtk::fake_quantize_float and their gradients, as in qtk/ops/.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace qtk {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // of the input, the scale and the zero point

// The operator, on any device and with autograd.
Tensor fake_quantize(
    const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point, at::IntArrayRef block_size,
    int64_t qmin, int64_t qmax);

Tensor fake_quantize_cpu(
    const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point, at::IntArrayRef block_size,
    int64_t qmin, int64_t qmax);

Gradients fake_quantize_backward_cpu(
    const Tensor& grad, const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point,
    at::IntArrayRef block_size, int64_t qmin, int64_t qmax, bool wants_scale, bool wants_zero_point);

std::tuple<Tensor, Tensor> fake_quantize_with_residual_cpu(
    const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point, at::IntArrayRef block_size,
    int64_t qmin, int64_t qmax, bool learned);

Gradients fake_quantize_residual_backward_cpu(
    const Tensor& grad, const Tensor& residual, const Tensor& scale, const OptionalTensor& zero_point,
    at::IntArrayRef block_size, int64_t qmin, int64_t qmax, bool wants_scale, bool wants_zero_point);

Tensor fake_quantize_float_cpu(
    const Tensor& input, const Tensor& scale, at::IntArrayRef block_size, int64_t exponent_bits, int64_t mantissa_bits,
    double largest);

std::tuple<Tensor, Tensor> fake_quantize_float_backward_cpu(
    const Tensor& grad, const Tensor& input, const Tensor& scale, at::IntArrayRef block_size, int64_t exponent_bits,
    int64_t mantissa_bits, double largest, bool wants_scale);

}  // namespace qtk
