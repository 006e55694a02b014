// The inner loops, each compiled for several instruction sets; the best one is chosen when the library loads.
//
// A tile is `rows` rows of `width` elements, one after the other in memory. Either each row has a scale (`..._rows`) or
// each column (`..._columns`). The formulas are those of qtk/numerics/affine.py, minifloat.py and
// straight_through.py.
#pragma once

#include <cstdint>

#include "affine.h"
#include "simd.h"

namespace qtk {

// The quantization grid at scale 1 is the integers of `Codes` or the numbers of a minifloat: biased float32 exponent of
// its smallest normal number, bits of its mantissa.
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

// Residuals, as in qtk/numerics/residual.py: int8_t of a fixed range, int16_t of a learned one.
constexpr float RESOLUTION = 65530.0f;
constexpr int LOW = -32768, NOT_A_NUMBER = -32767, EXACT_ZERO = 32766, HIGH = 32767;

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

// The same with the residual r beside y, and from r instead of x.
#define QTK_DECLARE_RESIDUAL_LOOPS(T, R)                                                                               \
  void fake_quantize_rows(const T* x, T* y, R* r, int64_t rows, int64_t width, Scales scales, Codes grid);             \
  void fake_quantize_columns(const T* x, T* y, R* r, int64_t rows, int64_t width, Scales scales, Codes grid);          \
  void pass_residual(const R* r, const T* g, T* dx, int64_t n);

#define QTK_DECLARE_LEARNED_LOOPS(T)                                                                                   \
  void backward_rows(                                                                                                  \
      const int16_t* x, const T* g, T* dx, int64_t rows, int64_t width, Scales scales, Codes grid,                     \
      Sums<double> sums);                                                                                              \
  void backward_columns(                                                                                               \
      const int16_t* x, const T* g, T* dx, int64_t rows, int64_t width, Scales scales, Codes grid, Sums<float> sums);

QTK_DECLARE_RESIDUAL_LOOPS(float, int8_t)
QTK_DECLARE_RESIDUAL_LOOPS(BFloat16, int8_t)
QTK_DECLARE_RESIDUAL_LOOPS(Half, int8_t)
QTK_DECLARE_RESIDUAL_LOOPS(float, int16_t)
QTK_DECLARE_RESIDUAL_LOOPS(BFloat16, int16_t)
QTK_DECLARE_RESIDUAL_LOOPS(Half, int16_t)
QTK_DECLARE_LEARNED_LOOPS(float)
QTK_DECLARE_LEARNED_LOOPS(BFloat16)
QTK_DECLARE_LEARNED_LOOPS(Half)

}  // namespace qtk
