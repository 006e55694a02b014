// The inner loop of coordinate descent on the rounding of one output.
#pragma once

#include <cstdint>

#include "affine.h"

namespace qtk {

// One output; pointers are to `columns` numbers. `gram` is [columns, columns].
template <class Real>
struct Output {
  Real* rounded;
  Real* change;
  Real* half_gradient;
  const Real* gram;
  const Real* step;
  const float* scale;
  const int32_t* zero;  // or null: all zero points are 0
  int64_t columns;
};

void descend(const Output<float>& output, Codes grid);
void descend(const Output<double>& output, Codes grid);

}  // namespace qtk
