#include "coordinate_descent_loops.h"

#include <algorithm>

namespace qtk {
namespace {

constexpr int64_t LANES = 16;  // weights looked at together

template <class Real>
INLINE Real best_of(const Output<Real>& output, int64_t column, Codes grid) {
  const Real least = output.rounded[column] + output.half_gradient[column] * output.step[column];
  const float zero = output.zero == nullptr ? 0.0f : static_cast<float>(output.zero[column]);
  return fake_quantized(static_cast<float>(least), effective_scale(output.scale[column]), zero, grid);
}

// Few weights move, so that the half gradient is brought up to date by rows of the Gram matrix.
template <class Real>
INLINE void descend_of(const Output<Real>& output, Codes grid) {
  for (int64_t column = 0; column < output.columns;) {
    const int64_t lanes = std::min(LANES, output.columns - column);
    Real best[LANES];
    int64_t moved = 0;
    const auto look = [&](int64_t count) __attribute__((always_inline)) {
      for (int64_t lane = 0; lane < count; ++lane) {
        best[lane] = best_of(output, column + lane, grid);
        moved += best[lane] == output.rounded[column + lane] ? 0 : 1;
      }
    };
    lanes == LANES ? look(LANES) : look(lanes);
    if (moved == 0) {
      column += lanes;
      continue;
    }
    int64_t first = 0;
    while (best[first] == output.rounded[column + first]) {
      ++first;
    }
    column += first;
    const Real move = output.rounded[column] - best[first];
    output.rounded[column] = best[first];
    output.change[column] += move;
    const Real* const products = output.gram + column * output.columns;
    Real* const half_gradient = output.half_gradient;
    for (int64_t other = 0; other < output.columns; ++other) {
      half_gradient[other] += move * products[other];
    }
    ++column;
  }
}

}  // namespace

FOR_EVERY_CPU void descend(const Output<float>& output, Codes grid) { descend_of(output, grid); }

FOR_EVERY_CPU void descend(const Output<double>& output, Codes grid) { descend_of(output, grid); }

}  // namespace qtk
