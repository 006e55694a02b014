#include "feedback_rounding_loops.h"

#include <algorithm>

namespace qtk {
namespace {

template <class Real>
INLINE void round_strip_of(const Rows<Real>& rows, int64_t columns, Codes grid, Real* changes) {
  std::fill_n(changes, rows.count * STRIP, Real(0));
  for (int64_t step = 0; step < rows.count; ++step) {
    const int64_t row = rows.backwards ? rows.count - 1 - step : step, at = row * rows.stride;
    const Real* const factors = rows.feedback + row * rows.count;
    const int64_t begin = rows.backwards ? row + 1 : 0, end = rows.backwards ? rows.count : row;
    Real lanes[STRIP] = {};
    std::copy_n(rows.target + at, columns, lanes);
    for (int64_t other = begin; other < end; ++other) {
      for (int64_t lane = 0; lane < STRIP; ++lane) {
        lanes[lane] += factors[other] * changes[other * STRIP + lane];
      }
    }
    for (int64_t lane = 0; lane < columns; ++lane) {
      const float zero = rows.zero == nullptr ? 0.0f : static_cast<float>(rows.zero[at + lane]);
      const Real nearest =
          fake_quantized(static_cast<float>(lanes[lane]), effective_scale(rows.scale[at + lane]), zero, grid);
      rows.target[at + lane] = nearest;
      changes[row * STRIP + lane] = rows.change[at + lane] -= nearest;
    }
  }
}

}  // namespace

FOR_EVERY_CPU void round_strip(Rows<float> rows, int64_t columns, Codes grid, float* changes) {
  round_strip_of(rows, columns, grid, changes);
}

FOR_EVERY_CPU void round_strip(Rows<double> rows, int64_t columns, Codes grid, double* changes) {
  round_strip_of(rows, columns, grid, changes);
}

}  // namespace qtk
