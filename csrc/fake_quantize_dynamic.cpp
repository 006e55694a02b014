// qtk::fake_quantize_dynamic on the CPU, as in qtk/numerics/dynamic.py.

#include "fake_quantize_dynamic.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "elements.h"
#include "fake_quantize.h"
#include "fake_quantize_loops.h"
#include "statistics.h"
#include "statistics_loops.h"
#include "tiles.h"

namespace qtk {
namespace {

constexpr int64_t NEAR = 8192;       // elements that stay in the L1 cache until the second read
constexpr int64_t WIDEST = 1 << 16;  // elements of a row that stay in the L2 cache

// The settings of a dynamic range.
struct Rule {
  Codes codes;
  bool symmetric;
};

std::vector<int64_t> scale_shape(const Tensor& x, at::IntArrayRef block_size) {
  if (block_size.empty()) {
    return {1};
  }
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(block_size.size()) == x.dim(), "blocks of ", block_size, " for a tensor of shape ",
      x.sizes());
  std::vector<int64_t> shape;
  for (int64_t axis = 0; axis < x.dim(); ++axis) {
    const int64_t size = block_size[axis];
    TORCH_CHECK_VALUE(
        size == -1 || (size > 0 && x.size(axis) % size == 0), "blocks of ", size, " do not divide axis ", axis,
        " of length ", x.size(axis));
    shape.push_back(size == -1 ? 1 : x.size(axis) / size);
  }
  return shape;
}

// Output buffers for scales and zero points.
class Ranges {
 public:
  Ranges(at::IntArrayRef shape, Rule rule)
      : scale(at::empty(shape, at::kFloat)),
        zero_point(at::empty(rule.symmetric ? at::IntArrayRef{0} : shape, at::kInt)),
        rule_(rule), scale_at_(scale.mutable_data_ptr<float>()), zero_point_at_(zero_point.mutable_data_ptr<int32_t>()),
        zero_(scale.numel(), 0.0f) {}

  void set(int64_t index, float low, float high, bool nan) {
    const auto [qmin, qmax] = rule_.codes;
    low = std::min(low, 0.0f);
    high = std::max(high, 0.0f);
    const float farthest = rule_.symmetric ? std::max(qmax, -qmin) : qmax - qmin;
    float step = rule_.symmetric ? std::max(high / qmax, low / qmin) : (high - low) / (qmax - qmin);
    step = step == 0.0f ? 1.0f : std::clamp(step, SMALLEST_SCALE, static_cast<float>(LARGEST / farthest));
    scale_at_[index] = nan ? NAN : step;
    if (!rule_.symmetric) {
      zero_[index] = nan ? qmin : std::clamp(std::nearbyint(qmin - low / step), qmin, qmax);
      zero_point_at_[index] = static_cast<int32_t>(zero_[index]);
    }
  }

  Scales from(int64_t index) const { return {scale_at_ + index, zero_.data() + index}; }

  Tensor scale, zero_point;

 private:
  static constexpr double LARGEST =
      std::numeric_limits<float>::max() * (1 - static_cast<double>(std::numeric_limits<float>::epsilon()));
  Rule rule_;
  float* scale_at_;
  int32_t* zero_point_at_;
  std::vector<float> zero_;
};

// One scale per row: a row is quantized while it is still in the cache from the pass for its minimum and maximum.
template <class T>
void by_rows(const Tensor& x, const Tensor& y, int64_t width, Ranges& ranges, Codes codes) {
  const T* from = source<T>(x);
  T* into = target<T>(y);
  const int64_t together = std::max<int64_t>(NEAR / width, 1);
  at::parallel_for(0, x.numel() / width, std::max<int64_t>(GRAIN / width, 1), [&](int64_t begin, int64_t end) {
    std::vector<float> low(together), high(together);
    std::vector<uint32_t> nan(together);
    for (; begin < end; begin += together) {
      const int64_t rows = std::min(together, end - begin);
      std::fill(low.begin(), low.end(), std::numeric_limits<float>::infinity());
      std::fill(high.begin(), high.end(), -std::numeric_limits<float>::infinity());
      std::fill(nan.begin(), nan.end(), 0);
      min_max_rows(from + begin * width, rows, width, {low.data(), high.data(), nan.data()});
      for (int64_t row = 0; row < rows; ++row) {
        ranges.set(begin + row, low[row], high[row], nan[row] != 0);
      }
      fake_quantize_rows(from + begin * width, into + begin * width, rows, width, ranges.from(begin), codes);
    }
  });
}

}  // namespace

Dynamic fake_quantize_dynamic_cpu(
    const Tensor& input, at::IntArrayRef block_size, int64_t qmin, int64_t qmax, bool symmetric) {
  if (!has_loops(input.scalar_type())) {
    auto [y, scale, zero_point] = fake_quantize_dynamic_cpu(input.to(at::kFloat), block_size, qmin, qmax, symmetric);
    return {y.to(input.scalar_type()), scale, zero_point};
  }
  const Codes codes{static_cast<float>(qmin), static_cast<float>(qmax)};
  Ranges ranges(scale_shape(input, block_size), {codes, symmetric});
  const int64_t scales = ranges.scale.numel();
  if (input.numel() == 0) {
    for (int64_t index = 0; index < scales; ++index) {
      ranges.set(index, 0.0f, 0.0f, false);
    }
    return {at::empty_like(input), ranges.scale, ranges.zero_point};
  }
  const Tensor x = dense(input);
  const Tiles tiles(x, block_size, scales);
  if (tiles.one_row_a_scale() && scales > 1 && tiles.width() <= WIDEST) {
    Tensor result = at::empty_like(input);
    const Tensor y = result.strides() == x.strides() ? result : at::empty_like(x);
    by_type(x.scalar_type(), [&](auto type) { by_rows<decltype(type)>(x, y, tiles.width(), ranges, codes); });
    return {y.is_same(result) ? result : result.copy_(y), ranges.scale, ranges.zero_point};
  }
  const auto [low, high] = min_max_cpu(x, block_size, scales);
  for (int64_t index = 0; index < scales; ++index) {
    const float lowest = low.const_data_ptr<float>()[index];
    ranges.set(index, lowest, high.const_data_ptr<float>()[index], std::isnan(lowest));
  }
  const OptionalTensor zero_point = symmetric ? std::nullopt : OptionalTensor(ranges.zero_point);
  return {
      fake_quantize_cpu(input, ranges.scale, zero_point, block_size, qmin, qmax), ranges.scale, ranges.zero_point};
}

}  // namespace qtk
