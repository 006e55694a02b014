#include "statistics_loops.h"

#include <cmath>
#include <limits>

namespace qtk {
namespace {

constexpr int LANES = 16;
constexpr int STRIPS = 4;  // strips of lanes that do not wait for one another

INLINE float smaller(float a, float b) { return b < a ? b : a; }
INLINE float larger(float a, float b) { return b > a ? b : a; }

template <class T>
INLINE void take(T x, float* low, float* high, uint32_t* nan) {
  const float value = load(x);
  *low = smaller(*low, value);
  *high = larger(*high, value);
  *nan |= value == value ? 0u : 1u;
}

template <class T>
INLINE void min_max_rows_of(const T* x, int64_t rows, int64_t width, Extremes into) {
  constexpr int TOGETHER = LANES * STRIPS;
  for (int64_t row = 0; row < rows; ++row, x += width) {
    float low[TOGETHER], high[TOGETHER];
    uint32_t nan[TOGETHER];
    for (int lane = 0; lane < TOGETHER; ++lane) {
      low[lane] = into.low[row];
      high[lane] = into.high[row];
      nan[lane] = into.nan[row];
    }
    int64_t i = 0;
    for (; i + TOGETHER <= width; i += TOGETHER) {
      for (int lane = 0; lane < TOGETHER; ++lane) {
        take(x[i + lane], low + lane, high + lane, nan + lane);
      }
    }
    for (int lane = 0; i < width; ++i, ++lane) {
      take(x[i], low + lane, high + lane, nan + lane);
    }
    for (int lane = 0; lane < TOGETHER; ++lane) {
      into.low[row] = smaller(into.low[row], low[lane]);
      into.high[row] = larger(into.high[row], high[lane]);
      into.nan[row] |= nan[lane];
    }
  }
}

template <class T>
INLINE void min_max_columns_of(
    const T* x, int64_t rows, int64_t width, float* __restrict low, float* __restrict high, uint32_t* __restrict nan) {
  for (int64_t row = 0; row < rows; ++row, x += width) {
    for (int64_t i = 0; i < width; ++i) {
      take(x[i], low + i, high + i, nan + i);
    }
  }
}

INLINE int32_t bin_of(float x, float first, float unit, int32_t count) {
  const float place = std::floor(x * unit);
  const float below = place < -1.0f ? place : -1.0f;  // what is just below 0 may come out as 0
  const float slot = (x < 0.0f ? below : place) - first;
  const float outside = static_cast<float>(count + 1);
  return static_cast<int32_t>(slot >= 0.0f && slot < static_cast<float>(count) ? slot : outside);
}

}  // namespace

#define DEFINE(T)                                                                                             \
  FOR_EVERY_CPU void min_max_rows(const T* __restrict x, int64_t rows, int64_t width, Extremes into) {        \
    min_max_rows_of(x, rows, width, into);                                                                    \
  }                                                                                                           \
  FOR_EVERY_CPU void min_max_columns(const T* __restrict x, int64_t rows, int64_t width, Extremes into) {     \
    min_max_columns_of(x, rows, width, into.low, into.high, into.nan);                                        \
  }                                                                                                           \
  FOR_EVERY_CPU void find_bins_row(const T* __restrict x, int64_t n, Bins bins, int32_t* __restrict slots) {   \
    const float first = *bins.first, unit = *bins.unit;                                                         \
    for (int64_t i = 0; i < n; ++i) {                                                                         \
      slots[i] = bin_of(load(x[i]), first, unit, bins.count);                                                  \
    }                                                                                                         \
  }                                                                                                           \
  FOR_EVERY_CPU void find_bins_columns(const T* __restrict x, int64_t n, Bins bins, int32_t* __restrict slots) { \
    const float* __restrict first = bins.first;                                                                   \
    const float* __restrict unit = bins.unit;                                                                 \
    for (int64_t i = 0; i < n; ++i) {                                                                         \
      slots[i] = bin_of(load(x[i]), first[i], unit[i], bins.count);                                            \
    }                                                                                                         \
  }

DEFINE(float)
DEFINE(BFloat16)
DEFINE(Half)

}  // namespace qtk
