#include "candidate_errors_loops.h"

#include <algorithm>
#include <cmath>

namespace qtk {
namespace {

constexpr int LANES = 32;          // sums are kept apart by lane, so that the compiler need not reorder them
constexpr int64_t STRETCH = 4096;  // elements summed in float before the sums go on in double; they stay in the L1
constexpr int64_t STRIP = 64;      // columns whose sums stay in registers or the L1 from row to row

template <bool SQUARED, bool WEIGHTED>
INLINE float error(float x, float weight, float scale, float zero, Codes codes) {
  const float code = std::nearbyint(x / scale) + zero;
  const float raised = codes.qmin > code ? codes.qmin : code;
  const float nearest = codes.qmax < raised ? codes.qmax : raised;
  const float off = x - (nearest - zero) * scale;
  const float size = SQUARED ? off * off : std::abs(off);
  return WEIGHTED ? size * weight : size;
}

template <bool SQUARED, bool WEIGHTED>
INLINE float sum_of(const float* x, const float* weights, int64_t n, float scale, float zero, Codes codes) {
  float lanes[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int lane = 0; lane < LANES; ++lane) {
      lanes[lane] += error<SQUARED, WEIGHTED>(x[i + lane], WEIGHTED ? weights[i + lane] : 0, scale, zero, codes);
    }
  }
  float sum = 0;
  for (; i < n; ++i) {
    sum += error<SQUARED, WEIGHTED>(x[i], WEIGHTED ? weights[i] : 0, scale, zero, codes);
  }
  for (int half = LANES / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return sum + lanes[0];
}

template <bool SQUARED, bool WEIGHTED>
INLINE void rows_of(const float* x, const float* weights, int64_t rows, int64_t width, Candidates of, Codes codes) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t begin = 0; begin < width; begin += STRETCH) {
      const int64_t n = std::min(STRETCH, width - begin), from = row * width + begin;
      for (int64_t candidate = 0; candidate < of.count; ++candidate) {
        const int64_t at = candidate * of.stride + row;
        of.sums[at] += sum_of<SQUARED, WEIGHTED>(
            x + from, WEIGHTED ? weights + from : nullptr, n, of.scale[at], of.zero[at], codes);
      }
    }
  }
}

template <bool SQUARED, bool WEIGHTED>
INLINE void strip_of(
    const float* x, const float* weights, int64_t rows, int64_t width, int64_t columns, const float* __restrict scale,
    const float* __restrict zero, double* sums, Codes codes) {
  float lanes[STRIP] = {};
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < columns; ++i) {
      lanes[i] += error<SQUARED, WEIGHTED>(
          x[row * width + i], WEIGHTED ? weights[row * width + i] : 0, scale[i], zero[i], codes);
    }
  }
  for (int64_t i = 0; i < columns; ++i) {
    sums[i] += lanes[i];
  }
}

template <bool SQUARED, bool WEIGHTED>
INLINE void columns_of(const float* x, const float* weights, int64_t rows, int64_t width, Candidates of, Codes codes) {
  constexpr int64_t DEPTH = STRETCH / STRIP;
  for (int64_t top = 0; top < rows; top += DEPTH) {
    for (int64_t left = 0; left < width; left += STRIP) {
      const int64_t from = top * width + left, depth = std::min(DEPTH, rows - top);
      for (int64_t candidate = 0; candidate < of.count; ++candidate) {
        const int64_t at = candidate * of.stride + left;
        const float* own = WEIGHTED ? weights + from : nullptr;
        if (left + STRIP <= width) {
          strip_of<SQUARED, WEIGHTED>(
              x + from, own, depth, width, STRIP, of.scale + at, of.zero + at, of.sums + at, codes);
        } else {
          strip_of<SQUARED, WEIGHTED>(
              x + from, own, depth, width, width - left, of.scale + at, of.zero + at, of.sums + at, codes);
        }
      }
    }
  }
}

}  // namespace

#define DEFINE(NAME)                                                                                           \
  FOR_EVERY_CPU void errors_##NAME(                                                                            \
      const float* x, int64_t rows, int64_t width, Candidates candidates, Measure measure, Codes codes) {      \
    const float* weights = measure.weights;                                                                    \
    if (measure.squared) {                                                                                     \
      weights ? NAME##_of<true, true>(x, weights, rows, width, candidates, codes)                              \
              : NAME##_of<true, false>(x, weights, rows, width, candidates, codes);                            \
    } else {                                                                                                   \
      weights ? NAME##_of<false, true>(x, weights, rows, width, candidates, codes)                             \
              : NAME##_of<false, false>(x, weights, rows, width, candidates, codes);                           \
    }                                                                                                          \
  }

DEFINE(rows)
DEFINE(columns)

}  // namespace qtk
