// The inner loop that rounds the columns of a matrix one after the other, each with the errors of those before it.
#pragma once

#include <cstdint>

#include "affine.h"

namespace qtk {

constexpr int64_t STRIP = 32;  // rows rounded at a time

// `rows` ≤ STRIP rows of the matrices, whose row i begins at [i * stride]; `feedback` is [columns, columns].
template <class Real>
struct Strip {
  Real* target;
  Real* change;
  const Real* feedback;
  const float* scale;
  const int32_t* zero;  // or null: all zero points are 0
  int64_t rows, columns;
  int64_t target_stride, change_stride, grid_stride;
  bool backwards;
};

// `space` holds 2 * columns * STRIP numbers.
void round_strip(const Strip<float>& strip, Codes grid, float* space);
void round_strip(const Strip<double>& strip, Codes grid, double* space);

}  // namespace qtk
