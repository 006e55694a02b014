// qtk::min_max, qtk::histogram and qtk::histogram_and_min_max on the CPU, as in qtk/ops/statistics.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <mutex>
#include <tuple>
#include <vector>

#include "elements.h"
#include "statistics.h"
#include "statistics_loops.h"
#include "tiles.h"

namespace qtk {
namespace {

using at::Tensor;

constexpr int64_t PANEL = 128;  // columns whose counts stay in the cache over all rows
constexpr int64_t MANY = 4;     // fewest panels for which threads are used
constexpr float INF = std::numeric_limits<float>::infinity();

Tensor with_loops(const Tensor& input) {
  return dense(has_loops(input.scalar_type()) ? input.detach() : input.detach().to(at::kFloat));
}

// Cuts [0, total) into pieces for threads, at the ends of scales where each has elements of its own.
template <class Run>
void in_pieces(const Tiles& tiles, int64_t total, int64_t scales, Run run) {
  const int64_t unit = tiles.one_row_a_scale() && scales > 1 ? tiles.width() : 1;
  at::parallel_for(0, total / unit, std::max<int64_t>(GRAIN / unit, 1), [&](int64_t begin, int64_t end) {
    run(begin * unit, end * unit);
  });
}

struct Found {
  explicit Found(int64_t scales) : low(scales, INF), high(scales, -INF), nan(scales, 0) {}

  Extremes from(int64_t index) { return {low.data() + index, high.data() + index, nan.data() + index}; }

  void merge(const Found& other) {
    for (size_t index = 0; index < low.size(); ++index) {
      low[index] = std::min(low[index], other.low[index]);
      high[index] = std::max(high[index], other.high[index]);
      nan[index] |= other.nan[index];
    }
  }

  // NaN in both where there was a NaN.
  std::tuple<Tensor, Tensor> tensors() const {
    const auto scales = static_cast<int64_t>(low.size());
    Tensor lows = at::empty({scales}, at::kFloat), highs = at::empty({scales}, at::kFloat);
    for (int64_t index = 0; index < scales; ++index) {
      lows.mutable_data_ptr<float>()[index] = nan[index] != 0 ? NAN : low[index];
      highs.mutable_data_ptr<float>()[index] = nan[index] != 0 ? NAN : high[index];
    }
    return {lows, highs};
  }

  std::vector<float> low, high;
  std::vector<uint32_t> nan;
};

}  // namespace

std::tuple<Tensor, Tensor> min_max_cpu(const Tensor& input, at::IntArrayRef block_size, int64_t scales) {
  TORCH_CHECK_VALUE(input.numel() > 0, "an empty tensor has no extremes");
  const Tensor x = with_loops(input);
  const Tiles tiles(x, block_size, scales);
  Found found(scales);
  std::mutex merging;
  by_type(x.scalar_type(), [&](auto type) {
    const auto* from = source<decltype(type)>(x);
    in_pieces(tiles, x.numel(), scales, [&](int64_t begin, int64_t end) {
      const bool alone = tiles.one_row_a_scale() && scales > 1;
      Found mine(alone ? 0 : scales);
      tiles.each(begin, end, [&](Tile tile) {
        const Extremes into = (alone ? found : mine).from(tile.index);
        tiles.by_column() ? min_max_columns(from + tile.offset, tile.rows, tile.width, into)
                          : min_max_rows(from + tile.offset, tile.rows, tile.width, into);
      });
      if (!alone) {
        const std::lock_guard<std::mutex> lock(merging);
        found.merge(mine);
      }
    });
  });
  return found.tensors();
}

namespace {

// Histogram of one scale.
class Tally {
 public:
  explicit Tally(int64_t bins) : slots_(bins + 2), tables_(TABLES * slots_) {}

  template <class T>
  void count(const T* x, int64_t n, Bins bins, int64_t* counts) {
    for (int64_t done = 0; done < n; done += MOST) {
      count_row(x + done, std::min(MOST, n - done), bins, tables_.data());
      empty_into(counts);
    }
  }

  template <class T>
  void count(const T* x, int64_t n, Bins bins, int64_t* counts, Extremes into) {
    for (int64_t done = 0; done < n; done += MOST) {
      count_row_and_extremes(x + done, std::min(MOST, n - done), bins, tables_.data(), into);
      empty_into(counts);
    }
  }

 private:
  static constexpr int64_t MOST = int64_t{1} << 31;  // most elements before counts are flushed, so that none overflows

  // Adds the counts of the tables to the result and clears them.
  void empty_into(int64_t* counts) {
    for (int64_t bin = 0; bin < slots_ - 2; ++bin) {
      for (int64_t turn = 0; turn < TABLES; ++turn) {
        counts[bin] += tables_[turn * slots_ + bin];
      }
    }
    std::fill(tables_.begin(), tables_.end(), 0);
  }

  int64_t slots_;  // the last but one is unused, the last counts elements outside all bins
  std::vector<uint32_t> tables_;
};

// Whether so many elements are worth the tables of a tally.
bool is_long(int64_t elements, int64_t bins) { return elements > 4 * bins; }

// Counts into [scales, bins], tile by tile.
template <class T>
class Counter {
 public:
  Counter(const T* x, const Tiles& tiles, const float* first, const float* unit, int64_t bins)
      : x_(x), tiles_(tiles), first_(first), unit_(unit), bins_(bins), tally_(bins) {}

  void count(int64_t begin, int64_t end, int64_t* counts) {
    tiles_.each(begin, end, [&](Tile tile) {
      for (int64_t row = 0; row < tile.rows; ++row) {
        const T* x = x_ + tile.offset + row * tile.width;
        if (tiles_.by_column()) {
          columns(x, tile.width, tile.index, counts);
        } else if (is_long(tile.width, bins_)) {
          tally_.count(x, tile.width, of(tile.index + row), counts + (tile.index + row) * bins_);
        } else {
          single(x, tile.width, tile.index + row, counts);
        }
      }
    });
  }

  // Columns [begin, end) of all rows; rows have `total` elements.
  void count_panel(int64_t begin, int64_t end, int64_t total, int64_t* counts) const {
    tiles_.each(0, total, [&](Tile tile) {
      for (int64_t row = 0; row < tile.rows; ++row) {
        columns(x_ + tile.offset + row * tile.width + begin, end - begin, tile.index + begin, counts);
      }
    });
  }

 private:
  Bins of(int64_t index) const { return {first_ + index, unit_ + index, bins_}; }

  void single(const T* x, int64_t n, int64_t index, int64_t* counts) const {
    std::array<int32_t, SLOTS> found;
    for (int64_t done = 0; done < n; done += SLOTS) {
      const int64_t here = std::min(SLOTS, n - done);
      find_bins_row(x + done, here, of(index), found.data());
      add(found.data(), here, counts + index * bins_, 0);
    }
  }

  void columns(const T* x, int64_t n, int64_t index, int64_t* counts) const {
    std::array<int32_t, SLOTS> found;
    for (int64_t done = 0; done < n; done += SLOTS) {
      const int64_t here = std::min(SLOTS, n - done);
      find_bins_columns(x + done, here, of(index + done), found.data());
      add(found.data(), here, counts + (index + done) * bins_, bins_);
    }
  }

  // Counts for one after the other are `step` apart.
  void add(const int32_t* found, int64_t n, int64_t* counts, int64_t step) const {
    const int64_t bins = bins_;  // a local copy: a member would be read again after each count
    for (int64_t i = 0; i < n; ++i, counts += step) {
      if (found[i] < bins) {
        ++counts[found[i]];
      }
    }
  }

  const T* x_;
  const Tiles& tiles_;
  const float* first_;
  const float* unit_;
  int64_t bins_;
  Tally tally_;
};

void check_bins(int64_t bins, const Tensor& exponent, int64_t scales) {
  TORCH_CHECK_VALUE(bins > 0 && bins < (1 << 24), bins, " bins; must be 1 to 2^24 - 1");
  TORCH_CHECK_VALUE(exponent.numel() == scales, exponent.numel(), " widths for ", scales, " histograms");
}

std::vector<float> units_of(const Tensor& exponent) {
  const Tensor powers = exponent.to(at::kInt).contiguous();
  std::vector<float> units(powers.numel());
  const int32_t* power = powers.const_data_ptr<int32_t>();
  std::transform(power, power + powers.numel(), units.begin(), [](int32_t of) { return std::ldexp(1.0f, -of); });
  return units;
}

Tensor histogram_cpu(
    const Tensor& input, const Tensor& first, const Tensor& exponent, int64_t bins, at::IntArrayRef block_size) {
  const int64_t scales = first.numel();
  check_bins(bins, exponent, scales);
  const Tensor x = with_loops(input);
  const Tensor from = first.detach().to(at::kFloat).contiguous();
  const std::vector<float> units = units_of(exponent);
  const Tiles tiles(x, block_size, scales);
  Tensor counts = at::zeros({scales, bins}, at::kLong);
  int64_t* const all = counts.mutable_data_ptr<int64_t>();
  std::mutex merging;
  by_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (tiles.by_column() && tiles.width() >= MANY * PANEL) {
      at::parallel_for(0, (tiles.width() + PANEL - 1) / PANEL, 1, [&](int64_t begin, int64_t end) {
        const Counter<T> counter(source<T>(x), tiles, source<float>(from), units.data(), bins);
        for (int64_t column = begin * PANEL; column < std::min(end * PANEL, tiles.width()); column += PANEL) {
          counter.count_panel(column, std::min(column + PANEL, tiles.width()), x.numel(), all);
        }
      });
      return;
    }
    in_pieces(tiles, x.numel(), scales, [&](int64_t begin, int64_t end) {
      Counter<T> counter(source<T>(x), tiles, source<float>(from), units.data(), bins);
      if (tiles.one_row_a_scale() && scales > 1) {
        counter.count(begin, end, all);
        return;
      }
      std::vector<int64_t> mine(scales * bins);
      counter.count(begin, end, mine.data());
      const std::lock_guard<std::mutex> lock(merging);
      std::transform(mine.begin(), mine.end(), all, all, std::plus<>());
    });
  });
  return counts;
}

// In one pass if all elements share a scale.
std::tuple<Tensor, Tensor, Tensor> histogram_and_min_max_cpu(
    const Tensor& input, const Tensor& first, const Tensor& exponent, int64_t bins, at::IntArrayRef block_size) {
  const int64_t scales = first.numel();
  if (scales != 1 || !is_long(input.numel(), bins)) {
    auto [low, high] = min_max_cpu(input, block_size, scales);
    return {histogram_cpu(input, first, exponent, bins, block_size), low, high};
  }
  check_bins(bins, exponent, scales);
  const Tensor x = with_loops(input), from = first.detach().to(at::kFloat);
  const std::vector<float> units = units_of(exponent);
  const Tiles tiles(x, block_size, scales);  // checks the blocks
  Tensor counts = at::zeros({scales, bins}, at::kLong);
  int64_t* const all = counts.mutable_data_ptr<int64_t>();
  Found found(scales);
  std::mutex merging;
  by_type(x.scalar_type(), [&](auto type) {
    const auto* elements = source<decltype(type)>(x);
    in_pieces(tiles, x.numel(), scales, [&](int64_t begin, int64_t end) {
      Found mine(scales);
      std::vector<int64_t> counted(bins);
      const Bins grid{source<float>(from), units.data(), bins};
      Tally(bins).count(elements + begin, end - begin, grid, counted.data(), mine.from(0));
      const std::lock_guard<std::mutex> lock(merging);
      found.merge(mine);
      std::transform(counted.begin(), counted.end(), all, all, std::plus<>());
    });
  });
  auto [low, high] = found.tensors();
  return {counts, low, high};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qtk, library) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  library.def("min_max(Tensor input, int[] block_size, int scales) -> (Tensor, Tensor)", tags);
  library.def("histogram(Tensor input, Tensor first, Tensor exponent, int bins, int[] block_size) -> Tensor", tags);
  library.def(
      "histogram_and_min_max(Tensor input, Tensor first, Tensor exponent, int bins, int[] block_size) -> "
      "(Tensor, Tensor, Tensor)",
      tags);
}

TORCH_LIBRARY_IMPL(qtk, CPU, library) {
  library.impl("min_max", min_max_cpu);
  library.impl("histogram", histogram_cpu);
  library.impl("histogram_and_min_max", histogram_and_min_max_cpu);
}

}  // namespace qtk
