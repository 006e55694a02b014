// The inner loops over tiles that sum the errors of candidates; tiles as in fake_quantize_loops.h.
#pragma once

#include <cstdint>

#include "fake_quantize_loops.h"

namespace qtk {

// Candidates for the scales of a tile: number c of scale s is at [c * stride + s], and so is its sum.
struct Candidates {
  const float* scale;
  const float* zero;
  double* sums;
  int64_t count, stride;
};

// Adds |x − x̂| of every candidate, squared or not, times the weight of the element where there are weights.
struct Measure {
  const float* weights;  // as x, or null
  bool squared;
};

void errors_rows(const float* x, int64_t rows, int64_t width, Candidates candidates, Measure measure, Codes codes);
void errors_columns(const float* x, int64_t rows, int64_t width, Candidates candidates, Measure measure, Codes codes);

}  // namespace qtk
