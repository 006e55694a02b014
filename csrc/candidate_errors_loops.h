// The inner loops over tiles that sum the quantization error of candidate scales; tiles as in fake_quantize_loops.h.
#pragma once

#include <cstdint>

#include "simd.h"

namespace qtk {

// Candidates for the scales of a tile: number c of scale s is at [c * stride + s], and so is its sum.
template <class Real>
struct Candidates {
  const Real* scale;
  const Real* zero;
  double* sums;
  int64_t count, stride;
};

// The error measure: |x − x̂|, squared if `squared`, times `clipped` where x is clipped, times the element's weight if
// there are weights.
template <class Real>
struct Measure {
  const Real* weights;  // as x, or null
  Real qmin, qmax, clipped;
  bool squared;
};

#define QTK_DECLARE_ERRORS(Real)                                                                                     \
  void errors_rows(                                                                                                  \
      const Real* x, int64_t rows, int64_t width, Candidates<Real> candidates, Measure<Real> measure);               \
  void errors_columns(                                                                                               \
      const Real* x, int64_t rows, int64_t width, Candidates<Real> candidates, Measure<Real> measure);

QTK_DECLARE_ERRORS(float)
QTK_DECLARE_ERRORS(double)

}  // namespace qtk
