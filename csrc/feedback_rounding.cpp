// qtk::round_with_feedback_ on the CPU, as in qtk/ops/feedback_rounding.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "elements.h"
#include "feedback_rounding_loops.h"
#include "lines.h"

namespace qtk {
namespace {

using at::Tensor;

template <class Real>
void round_rows(
    const Tensor& target, const Tensor& change, const Tensor& feedback, const Tensor& scale,
    const std::optional<Tensor>& zero_point, Codes grid, bool backwards) {
  const int64_t count = target.size(0), groups = target.size(1), columns = target.size(2);
  const int64_t strips = (columns + STRIP - 1) / STRIP, work = std::max<int64_t>(count * count * STRIP / 2, 1);
  at::parallel_for(0, groups * strips, std::max<int64_t>(GRAIN / work, 1), [&](int64_t begin, int64_t end) {
    Lines<Real> changes(count * STRIP);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t group = index / strips, first = index % strips * STRIP, at = group * columns + first;
      const Rows<Real> rows{
          target.mutable_data_ptr<Real>() + at, change.mutable_data_ptr<Real>() + at,
          feedback.const_data_ptr<Real>() + group * count * count, scale.const_data_ptr<float>() + at,
          zero_point ? zero_point->const_data_ptr<int32_t>() + at : nullptr, count, groups * columns, backwards};
      round_strip(rows, std::min(STRIP, columns - first), grid, changes.data());
    }
  });
}

void round_with_feedback_cpu(
    Tensor& target, Tensor& change, const Tensor& feedback, const Tensor& scale,
    const std::optional<Tensor>& zero_point, int64_t qmin, int64_t qmax, bool backwards) {
  TORCH_CHECK_VALUE(
      target.is_contiguous() && change.is_contiguous() && target.sizes() == change.sizes() &&
          target.sizes() == scale.sizes() && (!zero_point || target.sizes() == zero_point->sizes()),
      "target, change, scale and zero point must have one shape, and the first two no gaps");
  TORCH_CHECK_VALUE(
      feedback.sizes() == at::IntArrayRef({target.size(1), target.size(0), target.size(0)}),
      "feedback of shape ", feedback.sizes(), " is not [groups, rows, rows]");
  const Codes grid{static_cast<float>(qmin), static_cast<float>(qmax)};
  const Tensor factors = feedback.contiguous(), steps = scale.contiguous();
  const auto zeros = zero_point ? std::optional(zero_point->contiguous()) : std::nullopt;
  target.scalar_type() == at::kDouble ? round_rows<double>(target, change, factors, steps, zeros, grid, backwards)
                                      : round_rows<float>(target, change, factors, steps, zeros, grid, backwards);
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
