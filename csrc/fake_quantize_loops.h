// The inner loops, each compiled for several instruction sets; the best one is chosen when the library loads.
//
// A tile is `rows` rows of `width` elements, one after the other in memory. Either each row has a scale (`..._rows`) or
// each column (`..._columns`). The formulas are those of qtk/numerics/affine.py, minifloat.py and
// straight_through.py.
#pragma once

#include <cstdint>

#include "simd.h"

namespace qtk {

// The quantization grid at scale 1: integers,
struct Codes {
  float qmin;
  float qmax;
};

// or the numbers of a minifloat: biased float32 exponent of its smallest normal number, bits of its mantissa.
struct SmallFloats {
  float qmin;
  float qmax;
  uint32_t smallest;
  uint32_t mantissa;
};

// Scales and zero points, one per row or one per column. By row `zero` may be null: all zero points are 0.
struct Scales {
  const float* scale;
  const float* zero;
};

// Gradient sums of each scale. of_scale: Σ g · (x̂ − x)/scale over rounded and Σ g · x̂/scale over clipped elements;
// clipped: Σ g over clipped elements.
template <class Sum>
struct Sums {
  Sum* of_scale;
  Sum* clipped;
};

// fake_quantize: y = x̂. pass: dx = g where x is not clipped, else 0. backward: the same, and adds to the sums.
#define QTK_DECLARE_LOOPS(T, Grid)                                                                                     \
  void fake_quantize_rows(const T* x, T* y, int64_t rows, int64_t width, Scales scales, Grid grid);                    \
  void fake_quantize_columns(const T* x, T* y, int64_t rows, int64_t width, Scales scales, Grid grid);                 \
  void pass_rows(const T* x, const T* g, T* dx, int64_t rows, int64_t width, Scales scales, Grid grid);                \
  void pass_columns(const T* x, const T* g, T* dx, int64_t rows, int64_t width, Scales scales, Grid grid);             \
  void backward_rows(                                                                                                  \
      const T* x, const T* g, T* dx, int64_t rows, int64_t width, Scales scales, Grid grid, Sums<double> sums);        \
  void backward_columns(                                                                                               \
      const T* x, const T* g, T* dx, int64_t rows, int64_t width, Scales scales, Grid grid, Sums<float> sums);

QTK_DECLARE_LOOPS(float, Codes)
QTK_DECLARE_LOOPS(BFloat16, Codes)
QTK_DECLARE_LOOPS(Half, Codes)
QTK_DECLARE_LOOPS(float, SmallFloats)
QTK_DECLARE_LOOPS(BFloat16, SmallFloats)
QTK_DECLARE_LOOPS(Half, SmallFloats)

}  // namespace qtk
