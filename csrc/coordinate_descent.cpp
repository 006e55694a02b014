// qtk::descend_ on the CPU, as in qtk/ops/coordinate_descent.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "coordinate_descent_loops.h"

namespace qtk {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class Real>
void descend_all(
    const Tensor& rounded, const Tensor& change, const Tensor& half_gradient, const Tensor& gram, const Tensor& step,
    const Tensor& scale, const OptionalTensor& zero_point, Codes grid) {
  const int64_t outputs = rounded.size(1), columns = rounded.size(2);
  at::parallel_for(0, rounded.size(0) * outputs, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t at = index * columns, group = index / outputs;
      const Output<Real> output{
          rounded.mutable_data_ptr<Real>() + at,
          change.mutable_data_ptr<Real>() + at,
          half_gradient.mutable_data_ptr<Real>() + at,
          gram.const_data_ptr<Real>() + group * columns * columns,
          step.const_data_ptr<Real>() + group * columns,
          scale.const_data_ptr<float>() + at,
          zero_point ? zero_point->const_data_ptr<int32_t>() + at : nullptr,
          columns};
      descend(output, grid);
    }
  });
}

void descend_cpu(
    Tensor& rounded, Tensor& change, Tensor& half_gradient, const Tensor& gram, const Tensor& step, const Tensor& scale,
    const OptionalTensor& zero_point, int64_t qmin, int64_t qmax) {
  const auto fits = [&](const Tensor& other) { return other.dim() == 3 && other.sizes() == rounded.sizes(); };
  TORCH_CHECK_VALUE(
      fits(rounded) && fits(change) && fits(half_gradient) && fits(scale) && (!zero_point || fits(*zero_point)),
      "rounded, change, half_gradient, scale and zero point must have one shape of three axes");
  TORCH_CHECK_VALUE(
      rounded.is_contiguous() && change.is_contiguous() && half_gradient.is_contiguous(),
      "rounded, change and half_gradient must have no gaps");
  const int64_t groups = rounded.size(0), columns = rounded.size(2);
  TORCH_CHECK_VALUE(
      gram.dim() == 3 && gram.size(0) == groups && gram.size(1) == columns && gram.size(2) == columns &&
          step.dim() == 2 && step.size(0) == groups && step.size(1) == columns,
      "gram and step of shapes ", gram.sizes(), " and ", step.sizes(), " do not fit weights of shape ",
      rounded.sizes());
  const Codes grid{static_cast<float>(qmin), static_cast<float>(qmax)};
  const Tensor products = gram.contiguous(), steps = step.contiguous(), scales = scale.contiguous();
  const auto zeros = zero_point ? OptionalTensor(zero_point->contiguous()) : std::nullopt;
  rounded.scalar_type() == at::kDouble
      ? descend_all<double>(rounded, change, half_gradient, products, steps, scales, zeros, grid)
      : descend_all<float>(rounded, change, half_gradient, products, steps, scales, zeros, grid);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qtk, library) {
  library.def(
      "descend_(Tensor(a!) rounded, Tensor(b!) change, Tensor(c!) half_gradient, Tensor gram, Tensor step, Tensor "
      "scale, Tensor? zero_point, int qmin, int qmax) -> ()",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(qtk, CPU, library) {
  library.impl("descend_", descend_cpu);
}

}  // namespace qtk
