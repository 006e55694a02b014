// The inner loop that finds the candidate scale of least output error, as in qtk/ops/least_output_error.py.
#pragma once

#include <cstdint>

#include "simd.h"

namespace qtk {

// Candidates for the scales of rows: number c of row r is at [c * stride + r]; `zero` may be null: all are 0.
struct RangeCandidates {
  const float* scale;
  const float* zero;
  int64_t count, stride;
};

// The error of a row with the changes d = x - x̂ is Σ d² + mean (Σ d)² / n + gain (Σ d x)² / Σ x².
struct ErrorWeights {
  float qmin, qmax;
  double mean, gain;
};

// Index of the first candidate of least error for each of `rows` rows of `width` elements; sums are in double.
#define QTK_DECLARE_LEAST(T)                                                                           \
  void least_output_error_rows(                                                                        \
      const T* x, int64_t rows, int64_t width, RangeCandidates candidates, ErrorWeights weights, int64_t* index);

QTK_DECLARE_LEAST(float)
QTK_DECLARE_LEAST(BFloat16)
QTK_DECLARE_LEAST(Half)

}  // namespace qtk
