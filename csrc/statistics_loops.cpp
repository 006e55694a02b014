#include "statistics_loops.h"

#include <cmath>
#include <limits>

namespace qtk {
namespace {

constexpr int LANES = 16;
constexpr int STRIPS = 4;  // strips of lanes without data dependences on one another

INLINE float smaller(float a, float b) { return b < a ? b : a; }
INLINE float larger(float a, float b) { return b > a ? b : a; }

template <class T>
INLINE void take(T x, float* low, float* high, uint32_t* nan) {
  const float value = load(x);
  *low = smaller(*low, value);
  *high = larger(*high, value);
  *nan |= value == value ? 0u : 1u;
}

// The extremes of COUNT lanes, found in the first: half against half, for in a short row this costs as much as the
// elements.
template <int COUNT>
INLINE void fold(float* low, float* high, uint32_t* nan) {
  if constexpr (COUNT > 1) {
    constexpr int HALF = COUNT / 2;
    for (int lane = 0; lane < HALF; ++lane) {
      low[lane] = smaller(low[lane], low[HALF + lane]);
      high[lane] = larger(high[lane], high[HALF + lane]);
      nan[lane] |= nan[HALF + lane];
    }
    fold<HALF>(low, high, nan);
  }
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
    fold<TOGETHER>(low, high, nan);
    into.low[row] = smaller(into.low[row], low[0]);
    into.high[row] = larger(into.high[row], high[0]);
    into.nan[row] |= nan[0];
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

// The product with a unit below 1 may underflow: a number just below 0 would fall into the bin of 0.
template <bool MAY_VANISH>
INLINE int32_t bin_of(float x, float first, float unit, int64_t count) {
  float place = std::floor(x * unit);
  if constexpr (MAY_VANISH) {
    const float below = place < -1.0f ? place : -1.0f;
    place = x < 0.0f ? below : place;
  }
  const float slot = place - first;
  const float outside = static_cast<float>(count + 1);
  return static_cast<int32_t>(slot >= 0.0f && slot < static_cast<float>(count) ? slot : outside);
}

template <bool MAY_VANISH, class T, class Slot>
INLINE void find_bins_row_of(const T* x, int64_t n, float first, float unit, int64_t count, Slot* __restrict slots) {
  for (int64_t i = 0; i < n; ++i) {
    slots[i] = static_cast<Slot>(bin_of<MAY_VANISH>(load(x[i]), first, unit, count));
  }
}

// Not inlined: compilers would unroll it and gather addresses in vectors, which is twice as slow.
template <class Slot>
__attribute__((noinline)) void count_slots(const Slot* slots, int64_t n, int64_t length, uint32_t* tables) {
  int64_t i = 0;
  for (; i + TABLES <= n; i += TABLES) {
    for (int64_t turn = 0; turn < TABLES; ++turn) {
      ++tables[turn * length + slots[i + turn]];
    }
  }
  for (; i < n; ++i) {
    ++tables[slots[i]];
  }
}

// A strip is counted while the bins of the next are found: bins that were just written could be read only when all
// counts before them are written too.
template <class Slot, bool MAY_VANISH, class T>
INLINE void count_row_of(const T* x, int64_t n, Bins bins, uint32_t* tables) {
  constexpr int64_t STRIP = 64;  // what a CPU looks ahead
  const float first = *bins.first, unit = *bins.unit;
  const int64_t length = bins.count + 2;
  Slot slots[2][STRIP];
  int64_t waiting = 0;
  int turn = 0;
  for (; n >= STRIP; n -= STRIP, x += STRIP, turn ^= 1) {
    find_bins_row_of<MAY_VANISH>(x, STRIP, first, unit, bins.count, slots[turn]);
    count_slots(slots[turn ^ 1], waiting, length, tables);
    waiting = STRIP;
  }
  find_bins_row_of<MAY_VANISH>(x, n, first, unit, bins.count, slots[turn]);
  count_slots(slots[turn ^ 1], waiting, length, tables);
  count_slots(slots[turn], n, length, tables);
}

}  // namespace

#define DEFINE(T)                                                                                                \
  FOR_EVERY_CPU void min_max_rows(const T* __restrict x, int64_t rows, int64_t width, Extremes into) {           \
    min_max_rows_of(x, rows, width, into);                                                                       \
  }                                                                                                              \
  FOR_EVERY_CPU void min_max_columns(const T* __restrict x, int64_t rows, int64_t width, Extremes into) {        \
    min_max_columns_of(x, rows, width, into.low, into.high, into.nan);                                           \
  }                                                                                                              \
  FOR_EVERY_CPU void find_bins_row(const T* __restrict x, int64_t n, Bins bins, int32_t* __restrict slots) {     \
    find_bins_row_of<true>(x, n, *bins.first, *bins.unit, bins.count, slots);                                    \
  }                                                                                                              \
  FOR_EVERY_CPU void count_row(const T* x, int64_t n, Bins bins, uint32_t* tables) {                             \
    if (bins.count >= 0xffff) {                                                                                  \
      count_row_of<int32_t, true>(x, n, bins, tables);                                                           \
    } else if (*bins.unit < 1.0f) {                                                                              \
      count_row_of<uint16_t, true>(x, n, bins, tables);                                                          \
    } else {                                                                                                     \
      count_row_of<uint16_t, false>(x, n, bins, tables);                                                         \
    }                                                                                                            \
  }                                                                                                              \
  FOR_EVERY_CPU void find_bins_columns(const T* __restrict x, int64_t n, Bins bins, int32_t* __restrict slots) { \
    const float* __restrict first = bins.first;                                                                  \
    const float* __restrict unit = bins.unit;                                                                    \
    for (int64_t i = 0; i < n; ++i) {                                                                            \
      slots[i] = bin_of<true>(load(x[i]), first[i], unit[i], bins.count);                                        \
    }                                                                                                            \
  }

DEFINE(float)
DEFINE(BFloat16)
DEFINE(Half)

}  // namespace qtk
