// Affine fake quantization of one number, as in qtk/numerics/affine.py.
#pragma once

#include <cmath>

#include "simd.h"

namespace qtk {

// The quantization grid at scale 1: integers.
struct Codes {
  float qmin;
  float qmax;
};

// As in qtk/numerics/effective.py.
constexpr float SMALLEST_SCALE = 0x1p-80f;

INLINE float effective_scale(float size) {
  return std::abs(size) < SMALLEST_SCALE ? SMALLEST_SCALE : std::abs(size);
}

// Keeps NaN. In this order of operands each line is one instruction.
INLINE float clamped(float number, float low, float high) {
  const float raised = low > number ? low : number;
  return high < raised ? high : raised;
}

// Rounds to the quantization grid without clamping.
INLINE float nearest_of(float steps, float zero, Codes) { return std::nearbyint(steps) + zero; }

INLINE float fake_quantized(float x, float scale, float zero, Codes grid) {
  return (clamped(nearest_of(x / scale, zero, grid), grid.qmin, grid.qmax) - zero) * scale;
}

}  // namespace qtk
