// qtk::round_with_feedback_ on the CPU, as in qtk/ops/feedback_rounding.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>

#include "elements.h"
#include "feedback_rounding_loops.h"
#include "lines.h"

namespace qtk {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class Real>
void round_columns(
    const Tensor& target, const Tensor& change, const Tensor& feedback, const Tensor& scale,
    const OptionalTensor& zero_point, Codes grid, bool backwards) {
  const int64_t groups = target.size(0), rows = target.size(1), columns = target.size(2);
  const int64_t strips = (rows + STRIP - 1) / STRIP, work = std::max<int64_t>(columns * columns * STRIP / 2, 1);
  at::parallel_for(0, groups * strips, std::max<int64_t>(GRAIN / work, 1), [&](int64_t begin, int64_t end) {
    Lines<Real> space(2 * columns * STRIP);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t group = index / strips, row = index % strips * STRIP;
      const auto offset = [&](const Tensor& of) { return group * of.stride(0) + row * of.stride(1); };
      const Strip<Real> strip{
          target.mutable_data_ptr<Real>() + offset(target),
          change.mutable_data_ptr<Real>() + offset(change),
          feedback.const_data_ptr<Real>() + group * columns * columns,
          scale.const_data_ptr<float>() + offset(scale),
          zero_point ? zero_point->const_data_ptr<int32_t>() + offset(*zero_point) : nullptr,
          std::min(STRIP, rows - row), columns, target.stride(1), change.stride(1), scale.stride(1), backwards};
      round_strip(strip, grid, space.data());
    }
  });
}

void round_with_feedback_cpu(
    Tensor& target, Tensor& change, const Tensor& feedback, const Tensor& scale, const OptionalTensor& zero_point,
    int64_t qmin, int64_t qmax, bool backwards) {
  const auto fits = [&](const Tensor& other) { return other.dim() == 3 && other.sizes() == target.sizes(); };
  TORCH_CHECK_VALUE(
      fits(target) && fits(change) && fits(scale) && (!zero_point || fits(*zero_point)),
      "target, change, scale and zero point must have one shape of three axes");
  TORCH_CHECK_VALUE(target.stride(2) == 1 && change.stride(2) == 1, "target and change must be rows without gaps");
  const std::array square{target.size(0), target.size(2), target.size(2)};
  TORCH_CHECK_VALUE(
      feedback.sizes() == at::IntArrayRef(square), "feedback of shape ", feedback.sizes(), " is not ",
      at::IntArrayRef(square));
  const Codes grid{static_cast<float>(qmin), static_cast<float>(qmax)};
  const bool is_view = scale.stride(2) == 1 && (!zero_point || zero_point->strides() == scale.strides());
  const Tensor factors = feedback.contiguous(), steps = is_view ? scale : scale.contiguous();
  const auto zeros = !zero_point || is_view ? zero_point : OptionalTensor(zero_point->contiguous());
  target.scalar_type() == at::kDouble ? round_columns<double>(target, change, factors, steps, zeros, grid, backwards)
                                      : round_columns<float>(target, change, factors, steps, zeros, grid, backwards);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qtk, library) {
  library.def(
      "round_with_feedback_(Tensor(a!) target, Tensor(b!) change, Tensor feedback, Tensor scale, Tensor? zero_point, "
      "int qmin, int qmax, bool backwards) -> ()",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(qtk, CPU, library) {
  library.impl("round_with_feedback_", round_with_feedback_cpu);
}

}  // namespace qtk
