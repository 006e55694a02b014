// qtk::least_output_error on the CPU, as in qtk/ops/least_output_error.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

#include "affine.h"
#include "elements.h"
#include "least_output_error_loops.h"

namespace qtk {
namespace {

using at::Tensor;

Tensor least_output_error_cpu(
    const Tensor& rows, const Tensor& scales, const std::optional<Tensor>& zero_points, int64_t qmin, int64_t qmax,
    double mean, double gain) {
  TORCH_CHECK_VALUE(
      rows.dim() == 2 && scales.dim() == 2 && scales.size(1) == rows.size(0) && scales.size(0) > 0,
      "candidates ", scales.sizes(), " of rows ", rows.sizes(), "; must be [candidates, rows]");
  TORCH_CHECK_VALUE(
      !zero_points || zero_points->sizes() == scales.sizes(), "as many zero points as scales are needed");
  const Tensor given = rows.detach();
  const Tensor x = (has_loops(given.scalar_type()) ? given : given.to(at::kFloat)).contiguous();
  const Tensor steps = scales.detach().to(at::kFloat).abs().clamp_min(SMALLEST_SCALE).contiguous();
  const Tensor zeros = zero_points ? zero_points->detach().to(at::kFloat).contiguous() : Tensor();
  Tensor index = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  const int64_t width = x.size(1), count = scales.size(0), stride = scales.size(1);
  const ErrorWeights weights{static_cast<float>(qmin), static_cast<float>(qmax), mean, gain};
  by_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const int64_t grain = std::max<int64_t>(GRAIN / std::max<int64_t>(width * count, 1), 1);
    at::parallel_for(0, x.size(0), grain, [&](int64_t begin, int64_t end) {
      const RangeCandidates own{
          steps.const_data_ptr<float>() + begin, zero_points ? zeros.const_data_ptr<float>() + begin : nullptr, count,
          stride};
      least_output_error_rows(
          source<T>(x) + begin * width, end - begin, width, own, weights, index.mutable_data_ptr<int64_t>() + begin);
    });
  });
  return index;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qtk, library) {
  library.def(
      "least_output_error(Tensor rows, Tensor scales, Tensor? zero_points, int qmin, int qmax, float mean, float gain) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(qtk, CPU, library) {
  library.impl("least_output_error", least_output_error_cpu);
}

}  // namespace qtk
