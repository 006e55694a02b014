// qtk::candidate_errors on the CPU, as in qtk/ops/candidate_errors.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "affine.h"
#include "candidate_errors_loops.h"
#include "elements.h"
#include "tiles.h"

namespace qtk {
namespace {

using at::Tensor;

template <class Real>
Tensor errors(
    const Tensor& input, const Tensor& scales, const std::optional<Tensor>& zero_points, at::IntArrayRef block_size,
    Measure<Real> measure, const std::optional<Tensor>& importance) {
  const auto real = c10::CppTypeToScalarType<Real>::value;
  const Tensor x = dense(input.detach().to(real));
  const Tensor weights = importance ? at::empty_like(x).copy_(importance->detach().expand(x.sizes())) : Tensor();
  const Tensor steps = scales.detach().to(real).abs().clamp_min(SMALLEST_SCALE).contiguous();
  const Tensor zeros = zero_points ? zero_points->detach().to(real).contiguous() : at::zeros_like(steps);
  Tensor sums = at::zeros(scales.sizes(), at::kDouble);
  const int64_t candidates = scales.size(0), count = scales.size(1);
  const Tiles tiles(x, block_size, count);
  // Elements [begin, end) with `own` candidates from number `first` on.
  const auto run = [&](int64_t begin, int64_t end, int64_t first, int64_t own) {
    tiles.each(begin, end, [&](Tile tile) {
      const int64_t at = first * count + tile.index;
      const Candidates<Real> found{
          steps.const_data_ptr<Real>() + at, zeros.const_data_ptr<Real>() + at,
          sums.mutable_data_ptr<double>() + at, own, count};
      Measure<Real> here = measure;
      here.weights = weights.defined() ? weights.const_data_ptr<Real>() + tile.offset : nullptr;
      const Real* from = x.const_data_ptr<Real>() + tile.offset;
      tiles.by_column() ? errors_columns(from, tile.rows, tile.width, found, here)
                        : errors_rows(from, tile.rows, tile.width, found, here);
    });
  };
  // One thread computes each sum, so that results do not depend on the number of threads.
  if (x.numel() > 0 && tiles.one_row_a_scale() && count > 1) {
    const int64_t grain = std::max<int64_t>(GRAIN / (tiles.width() * std::max<int64_t>(candidates, 1)), 1);
    at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      run(begin * tiles.width(), end * tiles.width(), 0, candidates);
    });
  } else {
    const int64_t grain = std::max<int64_t>(GRAIN / std::max<int64_t>(x.numel(), 1), 1);
    at::parallel_for(0, candidates, grain, [&](int64_t begin, int64_t end) {
      run(0, x.numel(), begin, end - begin);
    });
  }
  return sums;
}

Tensor candidate_errors_cpu(
    const Tensor& input, const Tensor& scales, const std::optional<Tensor>& zero_points, at::IntArrayRef block_size,
    int64_t qmin, int64_t qmax, bool squared, const std::optional<Tensor>& importance, double clipped) {
  TORCH_CHECK_VALUE(scales.dim() == 2, "candidates are [candidates, scales], not ", scales.sizes());
  TORCH_CHECK_VALUE(
      !zero_points || zero_points->sizes() == scales.sizes(), "as many zero points as scales are needed");
  const auto of = [&](auto real) {
    using Real = decltype(real);
    const Measure<Real> measure{
        nullptr, static_cast<Real>(qmin), static_cast<Real>(qmax), static_cast<Real>(clipped), squared};
    return errors<Real>(input, scales, zero_points, block_size, measure, importance);
  };
  return input.scalar_type() == at::kDouble ? of(double{}) : of(float{});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qtk, library) {
  library.def(
      "candidate_errors(Tensor input, Tensor scales, Tensor? zero_points, int[] block_size, int qmin, int qmax, bool "
      "squared, Tensor? importance, float clipped) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(qtk, CPU, library) {
  library.impl("candidate_errors", candidate_errors_cpu);
}

}  // namespace qtk
