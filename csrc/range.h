// Scales and zero points as the loops read them, and the gradients of the given ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "fake_quantize_loops.h"
#include "lines.h"

namespace qtk {

// Buffers for the gradients of scales and zero points; null for a gradient that is not wanted.
struct Gradient {
  float* of_scale;
  float* of_zero_point;
};

// Effective scales and zero points, as in qtk/numerics/effective.py. By column they are always copied, for fast reads;
// by row, of which there may be many, only if an effective value differs from the stored one.
class Range {
 public:
  Range(const at::Tensor& scale, const std::optional<at::Tensor>& zero_point, float qmin, float qmax, bool by_column)
      : given_(scale.contiguous()), has_zero_(zero_point || by_column), zero_(has_zero_ ? scale.numel() : 0) {
    TORCH_CHECK_TYPE(scale.scalar_type() == at::kFloat, "scales are ", scale.scalar_type(), ", must be float32");
    TORCH_CHECK_VALUE(!zero_point || zero_point->numel() == scale.numel(), "as many zero points as scales are needed");
    const int64_t count = scale.numel();
    const float* given = given_.const_data_ptr<float>();
    if (by_column || !std::all_of(given, given + count, [](float size) { return size >= SMALLEST_SCALE; })) {
      acting_.emplace(count);
      std::transform(given, given + count, acting_->data(), effective_scale);
    }
    scale_ = acting_ ? acting_->data() : given;
    if (!zero_point) {
      return;
    }
    if (zero_point->is_floating_point()) {
      const at::Tensor zeros = zero_point->to(at::kFloat).contiguous();
      const float* learned = zeros.const_data_ptr<float>();
      std::transform(learned, learned + count, zero_.data(), [&](float zero) {
        return std::nearbyint(std::min(std::max(zero, qmin), qmax));
      });
    } else {
      const at::Tensor zeros = zero_point->to(at::kInt).contiguous();
      std::copy_n(zeros.const_data_ptr<int32_t>(), count, zero_.data());
    }
  }

  Range(const Range&) = delete;

  Scales from(int64_t index) const { return {scale_ + index, has_zero_ ? zero_.data() + index : nullptr}; }

  // Gradients of the given numbers from the sums of `n` scales, the first of which is `index`.
  void write(const Gradient& gradient, int64_t index, int64_t n, Sums<double> sums) const {
    const float* given = given_.const_data_ptr<float>() + index;
    for (int64_t i = 0; gradient.of_scale != nullptr && i < n; ++i) {
      const double sum = given[i] < 0 ? -sums.of_scale[i] : sums.of_scale[i];
      gradient.of_scale[index + i] = std::abs(given[i]) < SMALLEST_SCALE ? 0.0f : static_cast<float>(sum);
    }
    for (int64_t i = 0; gradient.of_zero_point != nullptr && i < n; ++i) {
      gradient.of_zero_point[index + i] = static_cast<float>(-sums.clipped[i] * scale_[index + i]);
    }
  }

 private:
  at::Tensor given_;
  std::optional<Lines<float>> acting_;
  const float* scale_;
  bool has_zero_;
  Lines<float> zero_;
};

}  // namespace qtk
