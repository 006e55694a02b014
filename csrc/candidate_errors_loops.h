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

// Candidates for the scale of one row, and the least that their errors can be.
struct RowCandidates {
  const double* scale;
  const double* zero;
  double* bounds;
  int64_t count;
};

// `row_bounds` sums the squared errors of a few elements near the ends of a row, where a narrow range clips: no sum over
// the whole row is smaller. `row_error` is the sum over the row, in the order of `errors_rows`, or any number above `most`
// once it is above. Both are in double.
#define QTK_DECLARE_ROW(T)                                                                                   \
  void row_bounds(const T* x, int64_t width, RowCandidates candidates, Measure<double> measure);             \
  double row_error(const T* x, int64_t width, double scale, double zero, Measure<double> measure, double most);

QTK_DECLARE_ROW(double)
QTK_DECLARE_ROW(float)
QTK_DECLARE_ROW(BFloat16)
QTK_DECLARE_ROW(Half)

}  // namespace qtk
