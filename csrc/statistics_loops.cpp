#include "statistics_loops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

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

// Four numbers in a register, which every processor has. Short rows take as long to fold as to read, and GCC 12 folds
// arrays element by element.
using Quad = float __attribute__((vector_size(16)));
using Flags = uint32_t __attribute__((vector_size(16)));

INLINE Quad quad(const float* x) {
  Quad values;
  __builtin_memcpy(&values, x, sizeof(values));
  return values;
}

INLINE Flags quad(const uint32_t* x) {
  Flags values;
  __builtin_memcpy(&values, x, sizeof(values));
  return values;
}

INLINE Quad smaller(Quad a, Quad b) { return b < a ? b : a; }
INLINE Quad larger(Quad a, Quad b) { return b > a ? b : a; }

// Extremes by lane.
struct Quads {
  Quad low = Quad{} + INFINITY, high = Quad{} - INFINITY;
  Flags nan = {};

  INLINE void take(Quad x) {
    low = smaller(low, x);
    high = larger(high, x);
    nan |= reinterpret_cast<Flags>(x != x);
  }

  INLINE void take(const Quads& other) {
    low = smaller(low, other.low);
    high = larger(high, other.high);
    nan |= other.nan;
  }
};

template <class T>
INLINE void min_max_single_rows(const T* x, int64_t rows, int64_t width, Extremes into) {
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
    Quads found;
    for (int lane = 0; lane < TOGETHER; lane += 4) {
      found.take({quad(low + lane), quad(high + lane), quad(nan + lane)});
    }
    for (int lane = 0; lane < 4; ++lane) {
      into.low[row] = smaller(into.low[row], found.low[lane]);
      into.high[row] = larger(into.high[row], found.high[lane]);
      into.nan[row] |= found.nan[lane];
    }
  }
}

// A row of n >= 4 elements. The last four may overlap with those before, which changes no extreme.
INLINE Quads quads_of(const float* x, int64_t n) {
  Quads a, b, c, d;  // without data dependences on one another
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    a.take(quad(x + i));
    b.take(quad(x + i + 4));
    c.take(quad(x + i + 8));
    d.take(quad(x + i + 12));
  }
  for (; i + 4 <= n; i += 4) {
    a.take(quad(x + i));
  }
  b.take(quad(x + n - 4));
  a.take(c);
  b.take(d);
  a.take(b);
  return a;
}

// Element i of the result combines those of row i.
template <class Four, class Combine>
INLINE Four folded(Four a, Four b, Four c, Four d, Combine combine) {
  const Four ab = combine(Four{a[0], b[0], a[1], b[1]}, Four{a[2], b[2], a[3], b[3]});
  const Four cd = combine(Four{c[0], d[0], c[1], d[1]}, Four{c[2], d[2], c[3], d[3]});
  return combine(Four{ab[0], ab[1], cd[0], cd[1]}, Four{ab[2], ab[3], cd[2], cd[3]});
}

INLINE void min_max_four_rows(const float* x, int64_t width, Extremes into) {
  const Quads a = quads_of(x, width), b = quads_of(x + width, width), c = quads_of(x + 2 * width, width),
              d = quads_of(x + 3 * width, width);
  const Quad low = folded(a.low, b.low, c.low, d.low, [](Quad x, Quad y) { return smaller(x, y); });
  const Quad high = folded(a.high, b.high, c.high, d.high, [](Quad x, Quad y) { return larger(x, y); });
  const Flags nan = folded(a.nan, b.nan, c.nan, d.nan, [](Flags x, Flags y) { return x | y; });
  for (int row = 0; row < 4; ++row) {
    into.low[row] = smaller(into.low[row], low[row]);
    into.high[row] = larger(into.high[row], high[row]);
    into.nan[row] |= nan[row] != 0 ? 1u : 0u;
  }
}

INLINE Extremes from_row(Extremes of, int64_t row) { return {of.low + row, of.high + row, of.nan + row}; }

INLINE const float* as_floats(const float* x, int64_t, float*) { return x; }

// Half precision goes by way of floats in the first cache.
template <class T>
INLINE const float* as_floats(const T* x, int64_t n, float* buffer) {
  load_all(x, n, buffer);
  return buffer;
}

template <class T>
INLINE void min_max_rows_of(const T* x, int64_t rows, int64_t width, Extremes into) {
  constexpr int64_t BUFFER = 2048, LONG = BUFFER / 4;  // from LONG on, more lanes gain more than folding costs
  const int64_t in_fours = width >= 4 && width < LONG ? rows / 4 * 4 : 0;
  float buffer[BUFFER];
  for (int64_t row = 0; row < in_fours;) {
    const int64_t taken = std::min(BUFFER / width / 4 * 4, in_fours - row);
    const float* from = as_floats(x + row * width, taken * width, buffer);
    for (const int64_t end = row + taken; row < end; row += 4, from += 4 * width) {
      min_max_four_rows(from, width, from_row(into, row));
    }
  }
  min_max_single_rows(x + in_fours * width, rows - in_fours, width, from_row(into, in_fours));
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

// Takes no extremes.
struct NoLanes {
  template <class T>
  INLINE void take_all(const T*, int64_t) {}
};

// Extremes by lane; a lane begins as those before.
struct Lanes {
  INLINE explicit Lanes(Extremes before) {
    std::fill_n(low, LANES, *before.low);
    std::fill_n(high, LANES, *before.high);
    std::fill_n(nan, LANES, *before.nan);
  }

  template <class T>
  INLINE void take_all(const T* x, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
      for (int lane = 0; lane < LANES; ++lane) {
        take(x[i + lane], low + lane, high + lane, nan + lane);
      }
    }
    for (int lane = 0; i < n; ++i, ++lane) {
      take(x[i], low + lane, high + lane, nan + lane);
    }
  }

  INLINE void write(Extremes into) const {
    for (int lane = 0; lane < LANES; ++lane) {
      *into.low = smaller(*into.low, low[lane]);
      *into.high = larger(*into.high, high[lane]);
      *into.nan |= nan[lane];
    }
  }

  float low[LANES], high[LANES];
  uint32_t nan[LANES];
};

// A strip is counted while the bins of the next are found: bins that were just written could be read only when all
// counts before them are written too.
template <class Slot, bool MAY_VANISH, class T, class Taking>
INLINE void count_row_of(const T* x, int64_t n, Bins bins, uint32_t* tables, Taking& lanes) {
  constexpr int64_t STRIP = 64;  // what a CPU looks ahead
  const float first = *bins.first, unit = *bins.unit;
  const int64_t length = bins.count + 2;
  Slot slots[2][STRIP];
  int64_t waiting = 0;
  int turn = 0;
  for (; n >= STRIP; n -= STRIP, x += STRIP, turn ^= 1) {
    lanes.take_all(x, STRIP);
    find_bins_row_of<MAY_VANISH>(x, STRIP, first, unit, bins.count, slots[turn]);
    count_slots(slots[turn ^ 1], waiting, length, tables);
    waiting = STRIP;
  }
  lanes.take_all(x, n);
  find_bins_row_of<MAY_VANISH>(x, n, first, unit, bins.count, slots[turn]);
  count_slots(slots[turn ^ 1], waiting, length, tables);
  count_slots(slots[turn], n, length, tables);
}

template <class T, class Taking>
INLINE void count_row_with(const T* x, int64_t n, Bins bins, uint32_t* tables, Taking& lanes) {
  if (bins.count >= 0xffff) {
    count_row_of<int32_t, true>(x, n, bins, tables, lanes);
  } else if (*bins.unit < 1.0f) {
    count_row_of<uint16_t, true>(x, n, bins, tables, lanes);
  } else {
    count_row_of<uint16_t, false>(x, n, bins, tables, lanes);
  }
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
    NoLanes none;                                                                                                \
    count_row_with(x, n, bins, tables, none);                                                                  \
  }                                                                                                              \
  FOR_EVERY_CPU void count_row_and_extremes(const T* x, int64_t n, Bins bins, uint32_t* tables, Extremes into) { \
    Lanes lanes(into);                                                                                           \
    count_row_with(x, n, bins, tables, lanes);                                                                 \
    lanes.write(into);                                                                                           \
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
