// qtk::least_candidate on the CPU, as in qtk/ops/least_candidate.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "affine.h"
#include "candidate_errors_loops.h"
#include "elements.h"

namespace qtk {
namespace {

using at::Tensor;

constexpr double SLACK = 0x1p-20;  // above the relative error of any sum in double

// The first candidate of least error. Most cannot be it, for at the ends of the row alone they lose more than another,
// the first guess, in all; the guess loses least there, if elsewhere the error is that of values spread evenly in a step.
template <class T>
int64_t least_of_row(const T* x, int64_t width, const RowCandidates& of, const Measure<double>& measure) {
  row_bounds(x, width, of, measure);
  const double* weights = measure.weights;
  const double elements = weights ? std::accumulate(weights, weights + width, 0.0) : static_cast<double>(width);
  const auto expected = [&](int64_t c) { return of.bounds[c] + elements * of.scale[c] * of.scale[c] / 12; };
  int64_t guess = 0;
  for (int64_t c = 1; c < of.count; ++c) {
    guess = expected(c) < expected(guess) ? c : guess;
  }
  const double found = row_error(x, width, of.scale[guess], of.zero[guess], measure, INFINITY);
  const double most = found * (1 + SLACK);
  std::vector<int64_t> left;
  for (int64_t c = 0; c < of.count; ++c) {
    if (!(of.bounds[c] > most) || std::isinf(of.scale[c])) {  // whose error may be NaN is left too
      left.push_back(c);
    }
  }
  std::vector<double> errors(left.size());
  at::parallel_for(0, left.size(), GRAIN / std::max<int64_t>(width, 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      errors[i] = left[i] == guess ? found : row_error(x, width, of.scale[left[i]], of.zero[left[i]], measure, most);
    }
  });
  size_t least = 0;
  for (size_t i = 1; i < left.size(); ++i) {  // the first NaN wins, as in torch.argmin
    least = errors[least] == errors[least] && !(errors[i] >= errors[least]) ? i : least;
  }
  return left[least];
}

Tensor least_candidate_cpu(
    const Tensor& rows, const Tensor& scales, const std::optional<Tensor>& zero_points, int64_t qmin, int64_t qmax,
    const std::optional<Tensor>& counts, double clipped) {
  TORCH_CHECK_VALUE(
      rows.dim() == 2 && scales.dim() == 2 && scales.size(1) == rows.size(0) && scales.size(0) > 0,
      "candidates ", scales.sizes(), " of rows ", rows.sizes(), "; must be [candidates, rows]");
  TORCH_CHECK_VALUE(
      !zero_points || zero_points->sizes() == scales.sizes(), "as many zero points as scales are needed");
  TORCH_CHECK_VALUE(!counts || counts->sizes() == rows.sizes(), "as many counts as elements are needed");
  const auto by_row = [](const Tensor& each) { return each.detach().to(at::kDouble).t().contiguous(); };
  const Tensor x = rows.detach().contiguous(), steps = by_row(scales).abs().clamp_min_(SMALLEST_SCALE);
  const Tensor zeros = zero_points ? by_row(*zero_points) : at::zeros_like(steps);
  const Tensor weights = counts ? counts->detach().to(at::kDouble).contiguous() : Tensor();
  Tensor index = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  const int64_t width = x.size(1), count = scales.size(0);
  const auto run = [&](auto type) {
    using T = decltype(type);
    const int64_t grain = std::max<int64_t>(GRAIN / std::max<int64_t>(width, 1), 1);
    at::parallel_for(0, x.size(0), grain, [&](int64_t begin, int64_t end) {
      std::vector<double> bounds(count);
      for (int64_t row = begin; row < end; ++row) {
        const RowCandidates own{
            steps.const_data_ptr<double>() + row * count, zeros.const_data_ptr<double>() + row * count, bounds.data(),
            count};
        const Measure<double> measure{
            counts ? weights.const_data_ptr<double>() + row * width : nullptr, static_cast<double>(qmin),
            static_cast<double>(qmax), clipped, true};
        index.mutable_data_ptr<int64_t>()[row] = least_of_row(source<T>(x) + row * width, width, own, measure);
      }
    });
  };
  x.scalar_type() == at::kDouble ? run(double{}) : by_type(x.scalar_type(), run);
  return index;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qtk, library) {
  library.def(
      "least_candidate(Tensor rows, Tensor scales, Tensor? zero_points, int qmin, int qmax, Tensor? counts, float "
      "clipped) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(qtk, CPU, library) {
  library.impl("least_candidate", least_candidate_cpu);
}

}  // namespace qtk
