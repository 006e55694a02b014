// The inner loop that rounds rows one after the other, each with the errors of those before it.
#pragma once

#include <cstdint>

#include "affine.h"

namespace qtk {

constexpr int64_t STRIP = 32;  // columns rounded at a time

// Row i of a column is at [i * stride]. `feedback` is [rows, rows].
template <class Real>
struct Rows {
  Real* target;
  Real* change;
  const Real* feedback;
  const float* scale;
  const int32_t* zero;  // or null: all zero points are 0
  int64_t count, stride;
  bool backwards;
};

// Rounds `columns` ≤ STRIP neighbouring columns; there is room for rows * STRIP changes.
void round_strip(Rows<float> rows, int64_t columns, Codes grid, float* changes);
void round_strip(Rows<double> rows, int64_t columns, Codes grid, double* changes);

}  // namespace qtk
