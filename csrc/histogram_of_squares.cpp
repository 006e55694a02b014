// qtk::histogram_of_squares on the CPU, as in qtk/ops/statistics.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "elements.h"
#include "statistics_loops.h"
#include "tiles.h"

namespace qtk {
namespace {

using at::Tensor;

constexpr int64_t PIECE = 1 << 20;  // fewest elements of a piece, whose sums are kept apart

// Adds the squares of factors to the sums [scales, bins] of the bins of their elements, tile by tile.
template <class T>
class Squares {
 public:
  Squares(const T* x, const float* factors, const Tiles& tiles, const float* first, const float* unit, int64_t bins)
      : x_(x), factors_(factors), tiles_(tiles), first_(first), unit_(unit), bins_(bins) {}

  void add(int64_t begin, int64_t end, double* sums) const {
    tiles_.each(begin, end, [&](Tile tile) {
      for (int64_t row = 0; row < tile.rows; ++row) {
        const int64_t offset = tile.offset + row * tile.width;
        const int64_t index = tiles_.by_column() ? tile.index : tile.index + row;
        add_row(offset, tile.width, index, sums);
      }
    });
  }

 private:
  void add_row(int64_t offset, int64_t n, int64_t index, double* sums) const {
    std::array<int32_t, SLOTS> found;
    const int64_t step = tiles_.by_column() ? bins_ : 0;
    for (int64_t done = 0; done < n; done += SLOTS) {
      const int64_t here = std::min(SLOTS, n - done), scale = step ? index + done : index;
      const Bins bins{first_ + scale, unit_ + scale, bins_};
      step ? find_bins_columns(x_ + offset + done, here, bins, found.data())
           : find_bins_row(x_ + offset + done, here, bins, found.data());
      const float* factor = factors_ + offset + done;
      double* into = sums + scale * bins_;
      for (int64_t i = 0; i < here; ++i, into += step) {
        const double square = static_cast<double>(factor[i]) * factor[i];
        if (found[i] < bins_ && std::isfinite(square)) {
          into[found[i]] += square;
        }
      }
    }
  }

  const T* x_;
  const float* factors_;
  const Tiles& tiles_;
  const float* first_;
  const float* unit_;
  int64_t bins_;
};

Tensor histogram_of_squares_cpu(
    const Tensor& input, const Tensor& factors, const Tensor& first, const Tensor& exponent, int64_t bins,
    at::IntArrayRef block_size) {
  const int64_t scales = first.numel();
  TORCH_CHECK_VALUE(bins > 0 && bins < (1 << 24), bins, " bins; must be 1 to 2^24 - 1");
  TORCH_CHECK_VALUE(exponent.numel() == scales, exponent.numel(), " widths for ", scales, " histograms");
  TORCH_CHECK_VALUE(factors.sizes() == input.sizes(), "factors ", factors.sizes(), " of a tensor ", input.sizes());
  const Tensor x = dense(has_loops(input.scalar_type()) ? input.detach() : input.detach().to(at::kFloat));
  const Tensor weights = at::empty_like(x, x.options().dtype(at::kFloat)).copy_(factors.detach());
  const Tensor from = first.detach().to(at::kFloat).contiguous(), powers = exponent.to(at::kInt).contiguous();
  std::vector<float> units(scales);
  const int32_t* power = powers.const_data_ptr<int32_t>();
  std::transform(power, power + scales, units.begin(), [](int32_t of) { return std::ldexp(1.0f, -of); });
  const Tiles tiles(x, block_size, scales);
  Tensor sums = at::zeros({scales, bins}, at::kDouble);
  double* const all = sums.mutable_data_ptr<double>();
  std::map<int64_t, std::vector<double>> pieces;  // by their begin, so that the sums do not depend on who was first
  std::mutex adding;
  by_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const Squares<T> squares(source<T>(x), source<float>(weights), tiles, source<float>(from), units.data(), bins);
    const int64_t unit = tiles.one_row_a_scale() && scales > 1 ? tiles.width() : 1;
    const int64_t grain = std::max(PIECE, scales * bins) / unit + 1;
    at::parallel_for(0, x.numel() / unit, grain, [&](int64_t begin, int64_t end) {
      if (unit > 1) {  // each scale is of one piece
        squares.add(begin * unit, end * unit, all);
        return;
      }
      std::vector<double> mine(scales * bins);
      squares.add(begin, end, mine.data());
      const std::lock_guard<std::mutex> lock(adding);
      pieces.emplace(begin, std::move(mine));
    });
  });
  for (const auto& [begin, mine] : pieces) {
    std::transform(mine.begin(), mine.end(), all, all, std::plus<>());
  }
  return sums;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qtk, library) {
  library.def(
      "histogram_of_squares(Tensor input, Tensor factors, Tensor first, Tensor exponent, int bins, int[] block_size) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(qtk, CPU, library) {
  library.impl("histogram_of_squares", histogram_of_squares_cpu);
}

}  // namespace qtk
