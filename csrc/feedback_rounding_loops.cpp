#include "feedback_rounding_loops.h"

#include <algorithm>

namespace qtk {
namespace {

// Between rows of `stride` numbers and columns of STRIP numbers.
template <class Real>
INLINE void to_columns(const Real* rows, int64_t stride, const Strip<Real>& strip, Real* columns) {
  for (int64_t lane = 0; lane < strip.rows; ++lane) {
    for (int64_t column = 0; column < strip.columns; ++column) {
      columns[column * STRIP + lane] = rows[lane * stride + column];
    }
  }
}

template <class Real>
INLINE void to_rows(const Real* columns, const Strip<Real>& strip, Real* rows, int64_t stride) {
  for (int64_t lane = 0; lane < strip.rows; ++lane) {
    for (int64_t column = 0; column < strip.columns; ++column) {
      rows[lane * stride + column] = columns[column * STRIP + lane];
    }
  }
}

template <class Real>
INLINE void round_strip_of(const Strip<Real>& strip, Codes grid, Real* space) {
  Real* const targets = space;
  Real* const changes = space + strip.columns * STRIP;
  to_columns(strip.target, strip.target_stride, strip, targets);
  to_columns(strip.change, strip.change_stride, strip, changes);
  for (int64_t step = 0; step < strip.columns; ++step) {
    const int64_t column = strip.backwards ? strip.columns - 1 - step : step;
    const int64_t begin = strip.backwards ? column + 1 : 0, end = strip.backwards ? strip.columns : column;
    const Real* const factors = strip.feedback + column * strip.columns;
    Real lanes[STRIP];
    std::copy_n(targets + column * STRIP, STRIP, lanes);
    for (int64_t other = begin; other < end; ++other) {
      for (int64_t lane = 0; lane < STRIP; ++lane) {
        lanes[lane] += factors[other] * changes[other * STRIP + lane];
      }
    }
    for (int64_t lane = 0; lane < strip.rows; ++lane) {
      const int64_t at = lane * strip.grid_stride + column;
      const float zero = strip.zero == nullptr ? 0.0f : static_cast<float>(strip.zero[at]);
      lanes[lane] = fake_quantized(static_cast<float>(lanes[lane]), effective_scale(strip.scale[at]), zero, grid);
    }
    for (int64_t lane = 0; lane < STRIP; ++lane) {
      targets[column * STRIP + lane] = lanes[lane];
      changes[column * STRIP + lane] -= lanes[lane];
    }
  }
  to_rows(targets, strip, strip.target, strip.target_stride);
  to_rows(changes, strip, strip.change, strip.change_stride);
}

}  // namespace

FOR_EVERY_CPU void round_strip(const Strip<float>& strip, Codes grid, float* space) {
  round_strip_of(strip, grid, space);
}

FOR_EVERY_CPU void round_strip(const Strip<double>& strip, Codes grid, double* space) {
  round_strip_of(strip, grid, space);
}

}  // namespace qtk
