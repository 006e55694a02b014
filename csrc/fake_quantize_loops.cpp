#include "fake_quantize_loops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace qtk {
namespace {

constexpr int LANES = 16;          // sums are kept apart by lane, so that the compiler need not reorder them
constexpr int64_t STRETCH = 4096;  // most elements summed in float before they are added in double
constexpr int64_t SHORT = 512;     // longest row for which the lanes of several rows are reduced together
constexpr int64_t RUN = 512;       // elements of half precision that are floats at a time
constexpr int64_t SHORT_RUN = 128;  // shorter rows are converted several at a time
constexpr int64_t MANY = 4;        // rows for which scales by column are taken apart
constexpr int64_t FETCHED = 64;    // elements that are fetched together
constexpr int64_t AHEAD = 2048;    // elements from those in work to those that are fetched
constexpr int64_t CACHE_LINE = 64;  // bytes

using qtk::clamped;  // beside those for minifloats
using qtk::fake_quantized;
using qtk::nearest_of;

template <class Grid>
INLINE float clamped(float number, Grid grid) {
  return clamped(number, grid.qmin, grid.qmax);
}

// The nearest number of the minifloat. Requires steps so small that 1 / unit does not underflow.
INLINE float rounded(float steps, SmallFloats grid) {
  const uint32_t exponent = std::max(as_bits(steps) & 0x7f800000u, grid.smallest << 23);
  const uint32_t unit = exponent - (grid.mantissa << 23);
  return std::nearbyint(steps * as_float((254u << 23) - unit)) * as_float(unit);
}

INLINE float nearest_of(float steps, float, SmallFloats grid) {
  return rounded(clamped(steps, -1e30f, 1e30f), grid);  // beyond every number of a minifloat
}

// qmin and qmax are on the grid, so that clamping before rounding gives the same result.
INLINE float fake_quantized(float x, float scale, float, SmallFloats grid) {
  return rounded(clamped(x / scale, grid), grid) * scale;
}

INLINE float zero_of(Scales scales, int64_t row) { return scales.zero == nullptr ? 0.0f : scales.zero[row]; }

// Masks without branches: all bits set, or 0.
INLINE uint32_t same(float one, float other) { return one == other ? 0xffffffffu : 0u; }

// Where the number needs no clamping.
INLINE uint32_t inside(float number, float nearest) { return same(nearest, number); }

INLINE float masked(float value, uint32_t mask) { return as_float(as_bits(value) & mask); }

template <class T>
INLINE T masked(T value, uint32_t mask) {
  return {static_cast<uint16_t>(value.bits & mask)};
}

template <class T, class Grid>
INLINE void pass(T x, T g, T* dx, float scale, float zero, Grid grid) {
  const float number = nearest_of(load(x) / scale, zero, grid);
  *dx = masked(g, inside(number, clamped(number, grid)));
}

template <class T>
INLINE void pass_inside(T g, uint32_t mask, T* dx) { *dx = masked(g, mask); }

INLINE void pass_inside(float, uint32_t mask, uint32_t* into) { *into = mask; }

// Writes dx, or the mask of what dx passes on, and adds to the sums of the range gradients.
template <class T, class D, class Grid>
INLINE void backward(T x, T g, D* dx, float scale, float zero, Grid grid, float* of_scale, float* clipped) {
  const float steps = load(x) / scale;
  const float number = nearest_of(steps, zero, grid);
  const float nearest = clamped(number, grid);
  const uint32_t mask = inside(number, nearest);
  const float slope = load(g);
  pass_inside(g, mask, dx);
  *of_scale += slope * ((nearest - zero) - masked(steps, mask));
  *clipped += masked(slope, ~mask);
}

template <class R>
int32_t residual_of(float x, float distance, float number, float nearest);

// Without branches: a residual is selected among integers, so that no float that is NaN is converted.
template <>
INLINE int32_t residual_of<int8_t>(float x, float, float number, float nearest) {
  const int positive = x <= 0 ? 0 : 1;
  return number == nearest ? positive : 3 * positive - 1;
}

template <>
INLINE int32_t residual_of<int16_t>(float x, float distance, float number, float nearest) {
  const uint32_t mask = inside(number, nearest);
  const int32_t units = static_cast<int32_t>(std::nearbyint(masked(distance * RESOLUTION, mask)));
  const int32_t within = x == 0 ? EXACT_ZERO : units;
  const int32_t outside = number < nearest ? LOW : (number > nearest ? HIGH : NOT_A_NUMBER);
  return mask != 0 ? within : outside;
}

template <class R>
INLINE float fake_quantized_with(float x, float scale, float zero, Codes grid, int32_t* residual) {
  const float steps = x / scale;
  const float number = nearest_of(steps, zero, grid);
  const float nearest = clamped(number, grid);
  *residual = residual_of<R>(x, (nearest - zero) - steps, number, nearest);
  return (nearest - zero) * scale;
}

INLINE uint32_t inside(int8_t r) { return (r >> 1) == 0 ? 0xffffffffu : 0u; }

INLINE uint32_t inside(int16_t r) { return r > NOT_A_NUMBER && r < HIGH ? 0xffffffffu : 0u; }

// As the function of x, from its residual.
template <class T, class D>
INLINE void backward(int16_t r, T g, D* dx, float, float zero, Codes grid, float* of_scale, float* clipped) {
  const float units = static_cast<float>(r);
  const uint32_t low = same(units, LOW), high = same(units, HIGH), nan = same(units, NOT_A_NUMBER);
  const uint32_t mask = ~(low | high | nan);
  const float within = masked(units * (1.0f / RESOLUTION), mask & ~same(units, EXACT_ZERO));
  const float error = as_float(
      as_bits(within) | as_bits(masked(grid.qmin - zero, low)) | as_bits(masked(grid.qmax - zero, high)) |
      as_bits(masked(NAN, nan)));
  const float slope = load(g);
  pass_inside(g, mask, dx);
  *of_scale += slope * error;
  *clipped += masked(slope, ~mask);
}

template <class T, class R>
INLINE void pass_residual_of(const R* r, const T* g, T* dx, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    dx[i] = masked(g[i], inside(r[i]));
  }
}

INLINE const int16_t* as_floats(const int16_t* residuals, int64_t, float*) { return residuals; }

template <class T>
INLINE const float* as_floats(const T* values, int64_t n, float* into) {
  load_all(values, n, into);
  return into;
}

// The elements themselves, or floats where a loop of its own converts faster.
template <class T>
INLINE const T* ready(const T* values, int64_t, float*) { return values; }

INLINE const float* ready(const Half* values, int64_t n, float* into) { return as_floats(values, n, into); }

// Fetches n elements, which may lie behind the end, into the first cache. Processors do it by themselves, but not always
// for several streams.
template <class T>
INLINE void fetch(const T* values, int64_t n) {
  for (int64_t byte = 0; byte < n * static_cast<int64_t>(sizeof(T)); byte += CACHE_LINE) {
    __builtin_prefetch(reinterpret_cast<const char*>(values) + byte, 0);
  }
}

template <class T>
INLINE void fetch_to_write(T* values, int64_t n) {
  for (int64_t byte = 0; byte < n * static_cast<int64_t>(sizeof(T)); byte += CACHE_LINE) {
    __builtin_prefetch(reinterpret_cast<char*>(values) + byte, 1);
  }
}

INLINE float at(float value, int64_t) { return value; }
INLINE float at(const float* values, int64_t i) { return values[i]; }

INLINE float shifted(float value, int64_t) { return value; }
INLINE const float* shifted(const float* values, int64_t i) { return values + i; }

template <class T, class D, class S, class Grid>
INLINE void forward_at_once(const T* x, D* y, int64_t n, S scale, S zero, Grid grid) {
  for (int64_t i = 0; i < n; ++i) {
    store(fake_quantized(load(x[i]), at(scale, i), at(zero, i), grid), y + i);
  }
}

// Residuals have 32 bits, as the values, until a loop of its own narrows them.
template <class T, class D, class S, class Grid, class R>
INLINE void forward_at_once(const T* x, D* y, int64_t n, S scale, S zero, Grid grid, R* residual) {
  int32_t wide[RUN];
  for (int64_t begin = 0; begin < n; begin += RUN) {
    const int64_t count = std::min(RUN, n - begin);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t j = begin + i;
      store(fake_quantized_with<R>(load(x[j]), at(scale, j), at(zero, j), grid, wide + i), y + j);
    }
    for (int64_t i = 0; i < count; ++i) {
      residual[begin + i] = static_cast<R>(wide[i]);
    }
  }
}

// Whether to fetch ahead where one tensor is read and one is written. Processors that have AVX-512 do so better by
// themselves; older ones gain an eighth.
bool fetches_single_streams() {
#if defined(__x86_64__)
  static const bool needed = !__builtin_cpu_supports("avx512f");
  return needed;
#else
  return true;
#endif
}

// Many floats, which may come from memory.
template <class S, class Grid, class... R>
INLINE void forward_fetching(const float* x, float* y, int64_t n, S scale, S zero, Grid grid, R*... residual) {
  int64_t i = 0;
  for (; i + FETCHED <= n; i += FETCHED) {
    fetch(x + i + AHEAD, FETCHED);
    fetch_to_write(y + i + AHEAD, FETCHED);
    forward_at_once(x + i, y + i, FETCHED, shifted(scale, i), shifted(zero, i), grid, residual + i...);
  }
  forward_at_once(x + i, y + i, n - i, shifted(scale, i), shifted(zero, i), grid, residual + i...);
}

// Half precision goes by way of floats in the first cache: conversion in a loop of its own is vectorized better.
template <class T, class S, class Grid, class... R>
INLINE void forward_of(const T* x, T* y, int64_t n, S scale, S zero, Grid grid, R*... residual) {
  if constexpr (std::is_same_v<T, float>) {
    n >= FETCHED && (std::is_pointer_v<S> || fetches_single_streams())
        ? forward_fetching(x, y, n, scale, zero, grid, residual...)
        : forward_at_once(x, y, n, scale, zero, grid, residual...);
    return;
  }
  float values[RUN];
  for (int64_t begin = 0; begin < n; begin += RUN) {
    const int64_t count = std::min(RUN, n - begin);
    forward_at_once(
        ready(x + begin, count, values), values, count, shifted(scale, begin), shifted(zero, begin), grid,
        residual + begin...);
    store_all(values, count, y + begin);
  }
}

// Several rows of half precision at a time.
template <class T, class Grid, class... R>
INLINE void forward_short_rows(
    const T* x, T* y, int64_t rows, int64_t width, Scales scales, Grid grid, R*... residual) {
  const int64_t together = RUN / std::max<int64_t>(width, 1);
  float values[RUN];
  for (int64_t first = 0; first < rows; first += together) {
    const int64_t here = std::min(together, rows - first), begin = first * width;
    as_floats(x + begin, here * width, values);
    for (int64_t i = 0; i < here; ++i) {
      const int64_t row = first + i;
      forward_at_once(
          values + i * width, values + i * width, width, scales.scale[row], zero_of(scales, row), grid,
          residual + row * width...);
    }
    store_all(values, here * width, y + begin);
  }
}

// One float of two neighbours, or two where neighbours differ.
struct Pairs {
  const float* lower;
  const float* upper;
};

INLINE float lower_at(float value, int64_t) { return value; }
INLINE float upper_at(float value, int64_t) { return value; }
INLINE float lower_at(Pairs values, int64_t i) { return values.lower[i]; }
INLINE float upper_at(Pairs values, int64_t i) { return values.upper[i]; }

// Two neighbours are one integer: a shift and a mask make a register of pairs two of floats, and back, where in order
// they would be permuted.
template <class S, class Grid>
INLINE void quantize_pairs(
    const BFloat16* x, int64_t pairs, S scale, S zero, Grid grid, float* lower, float* upper) {
  for (int64_t i = 0; i < pairs; ++i) {
    uint32_t pair;
    std::memcpy(&pair, x + 2 * i, sizeof(pair));
    lower[i] = fake_quantized(as_float(pair << 16), lower_at(scale, i), lower_at(zero, i), grid);
    upper[i] = fake_quantized(as_float(pair & 0xffff0000u), upper_at(scale, i), upper_at(zero, i), grid);
  }
}

INLINE void store_pairs(const float* lower, const float* upper, int64_t pairs, BFloat16* y) {
  for (int64_t i = 0; i < pairs; ++i) {
    const uint32_t pair = rounded_to_upper(lower[i]) >> 16 | (rounded_to_upper(upper[i]) & 0xffff0000u);
    std::memcpy(y + 2 * i, &pair, sizeof(pair));
  }
}

// Rows of an even number of bfloat16, several at a time, or a part of one.
template <class Grid>
INLINE void forward_pairs(
    const BFloat16* x, BFloat16* y, int64_t rows, int64_t width, Scales scales, Grid grid) {
  const int64_t together = std::max<int64_t>(RUN / width, 1);
  float lower[RUN / 2], upper[RUN / 2];
  for (int64_t first = 0; first < rows; first += together) {
    const int64_t here = std::min(together, rows - first);
    for (int64_t begin = 0; begin < width; begin += RUN) {
      const int64_t at = first * width + begin, pairs = std::min(RUN, width - begin) / 2;
      for (int64_t row = 0; row < here; ++row) {
        quantize_pairs(
            x + at + row * width, pairs, scales.scale[first + row], zero_of(scales, first + row), grid,
            lower + row * pairs, upper + row * pairs);
      }
      store_pairs(lower, upper, here * pairs, y + at);
    }
  }
}

// Columns of bfloat16: their scales are taken apart once for all rows.
template <class Grid>
INLINE void forward_pairs_of_columns(
    const BFloat16* x, BFloat16* y, int64_t rows, int64_t width, Scales scales, Grid grid) {
  float scale[2][RUN / 2], zero[2][RUN / 2], lower[RUN / 2], upper[RUN / 2];
  for (int64_t begin = 0; begin < width; begin += RUN) {
    const int64_t columns = std::min(RUN, width - begin), pairs = columns / 2, last = begin + columns - 1;
    for (int64_t i = 0; i < pairs; ++i) {
      for (int side = 0; side < 2; ++side) {
        scale[side][i] = scales.scale[begin + 2 * i + side];
        zero[side][i] = scales.zero[begin + 2 * i + side];
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = row * width;
      fetch(x + at + width + begin, columns);
      fetch_to_write(y + at + width + begin, columns);
      quantize_pairs(
          x + at + begin, pairs, Pairs{scale[0], scale[1]}, Pairs{zero[0], zero[1]}, grid, lower, upper);
      store_pairs(lower, upper, pairs, y + at + begin);
      if (columns % 2 == 1) {
        store(fake_quantized(load(x[at + last]), scales.scale[last], scales.zero[last], grid), y + at + last);
      }
    }
  }
}

template <class T, class Grid, class... R>
INLINE void forward_rows_of(
    const T* x, T* y, int64_t rows, int64_t width, Scales scales, Grid grid, R*... residual) {
  if constexpr (std::is_same_v<T, BFloat16> && sizeof...(R) == 0) {
    if (width % 2 == 0 && width >= 2 * LANES) {
      forward_pairs(x, y, rows, width, scales, grid);
      return;
    }
  }
  if (!std::is_same_v<T, float> && width < SHORT_RUN) {
    forward_short_rows(x, y, rows, width, scales, grid, residual...);
    return;
  }
  for (int64_t row = 0; row < rows; ++row, x += width, y += width) {
    forward_of(x, y, width, scales.scale[row], zero_of(scales, row), grid, residual + row * width...);
  }
}

template <class T, class Grid, class... R>
INLINE void forward_columns_of(
    const T* x, T* y, int64_t rows, int64_t width, Scales scales, Grid grid, R*... residual) {
  if constexpr (std::is_same_v<T, BFloat16> && sizeof...(R) == 0) {
    if (rows >= MANY && width >= 2 * LANES) {
      forward_pairs_of_columns(x, y, rows, width, scales, grid);
      return;
    }
  }
  const float* __restrict scale = scales.scale;
  const float* __restrict zero = scales.zero;
  for (int64_t row = 0; row < rows; ++row, x += width, y += width) {
    forward_of(x, y, width, scale, zero, grid, residual + row * width...);
  }
}

template <class T, class Grid>
INLINE void pass_rows_of(
    const T* x, const T* g, T* dx, int64_t rows, int64_t width, Scales scales, Grid grid) {
  for (int64_t row = 0; row < rows; ++row, x += width, g += width, dx += width) {
    const float scale = scales.scale[row], zero = zero_of(scales, row);
    for (int64_t i = 0; i < width; ++i) {
      pass(x[i], g[i], dx + i, scale, zero, grid);
    }
  }
}

template <class T, class Grid>
INLINE void pass_columns_of(
    const T* x, const T* g, T* dx, int64_t rows, int64_t width, Scales scales, Grid grid) {
  const float* __restrict scale = scales.scale;
  const float* __restrict zero = scales.zero;
  for (int64_t row = 0; row < rows; ++row, x += width, g += width, dx += width) {
    for (int64_t i = 0; i < width; ++i) {
      pass(x[i], g[i], dx + i, scale[i], zero[i], grid);
    }
  }
}

// Adds the sums of GROUP rows, each in COUNT parts, to their totals. Halves are added for all rows at once, for in a
// short row this costs as much as the elements.
template <int GROUP, int COUNT = LANES>
INLINE void add_lanes(const float* lanes, double* totals) {
  if constexpr (COUNT == 1) {
    for (int row = 0; row < GROUP; ++row) {
      totals[row] += lanes[row];
    }
  } else {
    constexpr int HALF = COUNT / 2;
    float halves[GROUP * HALF];
    for (int row = 0; row < GROUP; ++row) {
      for (int lane = 0; lane < HALF; ++lane) {
        halves[row * HALF + lane] = lanes[row * COUNT + lane] + lanes[row * COUNT + HALF + lane];
      }
    }
    add_lanes<GROUP, HALF>(halves, totals);
  }
}

// A row or a part of one; writes the sums by lane.
template <class X, class T, class D, class Grid>
INLINE void backward_lanes(
    const X* x, const T* g, D* dx, int64_t n, float scale, float zero, Grid grid, float* of_scale, float* clipped) {
  float sums_of_scale[LANES] = {}, sums_clipped[LANES] = {};
  int64_t i = 0;
#pragma GCC unroll 2  // 2 to 3 % faster
  for (; i + LANES <= n; i += LANES) {
    if (std::is_same_v<D, float> && n >= FETCHED) {  // in memory, not in buffers
      fetch(x + i + AHEAD, LANES);
      fetch(g + i + AHEAD, LANES);
      fetch_to_write(dx + i + AHEAD, LANES);
    }
    for (int lane = 0; lane < LANES; ++lane) {
      const int64_t at = i + lane;
      backward(x[at], g[at], dx + at, scale, zero, grid, sums_of_scale + lane, sums_clipped + lane);
    }
  }
  for (int lane = 0; lane < LANES; ++lane) {
    of_scale[lane] = sums_of_scale[lane];
    clipped[lane] = sums_clipped[lane];
  }
  for (; i < n; ++i, ++of_scale, ++clipped) {
    backward(x[i], g[i], dx + i, scale, zero, grid, of_scale, clipped);
  }
}

// Whole rows of n elements, or a part of one. Half precision goes by way of floats, as in the forward.
template <class X, class T, class Grid>
INLINE void backward_parts(
    const X* x, const T* g, T* dx, int64_t rows, int64_t n, Scales scales, int64_t row, Grid grid, float* of_scale,
    float* clipped) {
  const auto each = [&](const auto* x, const auto* g, auto* dx) {
    for (int64_t i = 0; i < rows; ++i) {
      backward_lanes(
          x + i * n, g + i * n, dx + i * n, n, scales.scale[row + i], zero_of(scales, row + i), grid,
          of_scale + i * LANES, clipped + i * LANES);
    }
  };
  if constexpr (std::is_same_v<T, float>) {
    each(x, g, dx);
  } else {
    float values[RUN], slopes[RUN];
    uint32_t masks[RUN];
    each(as_floats(x, rows * n, values), as_floats(g, rows * n, slopes), masks);
    for (int64_t i = 0; i < rows * n; ++i) {
      dx[i] = masked(g[i], masks[i]);
    }
  }
}

// GROUP rows at a time, of which there are a multiple.
template <int GROUP, class X, class T, class Grid>
INLINE void backward_groups(
    const X* x, const T* g, T* dx, int64_t rows, int64_t width, Scales scales, Grid grid, Sums<double> sums) {
  const int64_t longest = std::is_same_v<T, float> ? STRETCH : RUN;
  const int64_t together = longest / std::clamp<int64_t>(width, 1, longest);
  for (int64_t first = 0; first < rows; first += GROUP) {
    for (int64_t begin = 0; begin < width; begin += longest) {
      const int64_t n = std::min(longest, width - begin);
      float of_scale[GROUP * LANES], clipped[GROUP * LANES];
      for (int64_t row = 0; row < GROUP; row += together) {
        const int64_t at = (first + row) * width + begin;
        backward_parts(
            x + at, g + at, dx + at, std::min(together, GROUP - row), n, scales, first + row, grid,
            of_scale + row * LANES, clipped + row * LANES);
      }
      add_lanes<GROUP>(of_scale, sums.of_scale + first);
      add_lanes<GROUP>(clipped, sums.clipped + first);
    }
  }
}

template <class X, class T, class Grid>
INLINE void backward_rows_of(
    const X* x, const T* g, T* dx, int64_t rows, int64_t width, Scales scales, Grid grid, Sums<double> sums) {
  constexpr int GROUP = 16;
  const int64_t grouped = width <= SHORT ? rows / GROUP * GROUP : 0, at = grouped * width;
  const Scales rest{scales.scale + grouped, scales.zero == nullptr ? nullptr : scales.zero + grouped};
  backward_groups<GROUP>(x, g, dx, grouped, width, scales, grid, sums);
  backward_groups<1>(
      x + at, g + at, dx + at, rows - grouped, width, rest, grid, {sums.of_scale + grouped, sums.clipped + grouped});
}

// A part of one row. The loop is long, so that compilers vectorize it whatever the widths of its numbers.
template <class X, class T, class Grid>
INLINE void backward_columns_of_row(
    const X* __restrict x, const T* __restrict g, T* __restrict dx, int64_t begin, int64_t end,
    const float* __restrict scale, const float* __restrict zero, Grid grid, float* __restrict of_scale,
    float* __restrict clipped) {
  for (int64_t i = begin; i < end; ++i) {
    backward(x[i], g[i], dx + i, scale[i], zero[i], grid, of_scale + i, clipped + i);
  }
}

template <class X, class T, class Grid>
INLINE void backward_columns_of(
    const X* x, const T* g, T* dx, int64_t rows, int64_t width, Scales scales, Grid grid, Sums<float> sums) {
  const auto add = [&](int64_t begin, int64_t end) {
    backward_columns_of_row(x, g, dx, begin, end, scales.scale, scales.zero, grid, sums.of_scale, sums.clipped);
  };
  for (int64_t row = 0; row < rows; ++row, x += width, g += width, dx += width) {
    int64_t i = 0;
    for (; std::is_same_v<T, float> && i + FETCHED <= width; i += FETCHED) {
      constexpr int64_t NEAR = AHEAD / 2;  // scales and sums take their share of the first cache
      fetch(x + i + NEAR, FETCHED);
      fetch(g + i + NEAR, FETCHED);
      fetch_to_write(dx + i + NEAR, FETCHED);
      add(i, i + FETCHED);
    }
    add(i, width);
  }
}

}  // namespace

// Clones are made of plain functions only.
#define DEFINE_BACKWARD(X, T, Grid)                                                                                    \
  FOR_EVERY_CPU void backward_rows(                                                                                    \
      const X* __restrict x, const T* __restrict g, T* __restrict dx, int64_t rows, int64_t width, Scales scales,      \
      Grid grid, Sums<double> sums) {                                                                                  \
    backward_rows_of(x, g, dx, rows, width, scales, grid, sums);                                                       \
  }                                                                                                                    \
  FOR_EVERY_CPU void backward_columns(                                                                                 \
      const X* __restrict x, const T* __restrict g, T* __restrict dx, int64_t rows, int64_t width, Scales scales,      \
      Grid grid, Sums<float> sums) {                                                                                   \
    backward_columns_of(x, g, dx, rows, width, scales, grid, sums);                                                    \
  }

#define DEFINE(T, Grid)                                                                                                \
  FOR_EVERY_CPU void fake_quantize_rows(                                                                               \
      const T* __restrict x, T* __restrict y, int64_t rows, int64_t width, Scales scales, Grid grid) {                 \
    forward_rows_of(x, y, rows, width, scales, grid);                                                                  \
  }                                                                                                                    \
  FOR_EVERY_CPU void fake_quantize_columns(                                                                            \
      const T* __restrict x, T* __restrict y, int64_t rows, int64_t width, Scales scales, Grid grid) {                 \
    forward_columns_of(x, y, rows, width, scales, grid);                                                               \
  }                                                                                                                    \
  FOR_EVERY_CPU void pass_rows(                                                                                        \
      const T* __restrict x, const T* __restrict g, T* __restrict dx, int64_t rows, int64_t width, Scales scales,      \
      Grid grid) {                                                                                                     \
    pass_rows_of(x, g, dx, rows, width, scales, grid);                                                                 \
  }                                                                                                                    \
  FOR_EVERY_CPU void pass_columns(                                                                                     \
      const T* __restrict x, const T* __restrict g, T* __restrict dx, int64_t rows, int64_t width, Scales scales,      \
      Grid grid) {                                                                                                     \
    pass_columns_of(x, g, dx, rows, width, scales, grid);                                                              \
  }                                                                                                                    \
  DEFINE_BACKWARD(T, T, Grid)

#define DEFINE_RESIDUAL(T, R)                                                                                          \
  FOR_EVERY_CPU void fake_quantize_rows(                                                                               \
      const T* __restrict x, T* __restrict y, R* __restrict r, int64_t rows, int64_t width, Scales scales,             \
      Codes grid) {                                                                                                    \
    forward_rows_of(x, y, rows, width, scales, grid, r);                                                               \
  }                                                                                                                    \
  FOR_EVERY_CPU void fake_quantize_columns(                                                                            \
      const T* __restrict x, T* __restrict y, R* __restrict r, int64_t rows, int64_t width, Scales scales,             \
      Codes grid) {                                                                                                    \
    forward_columns_of(x, y, rows, width, scales, grid, r);                                                            \
  }                                                                                                                    \
  FOR_EVERY_CPU void pass_residual(const R* __restrict r, const T* __restrict g, T* __restrict dx, int64_t n) {        \
    pass_residual_of(r, g, dx, n);                                                                                     \
  }

DEFINE(float, Codes)
DEFINE(BFloat16, Codes)
DEFINE(Half, Codes)
DEFINE(float, SmallFloats)
DEFINE(BFloat16, SmallFloats)
DEFINE(Half, SmallFloats)
DEFINE_RESIDUAL(float, int8_t)
DEFINE_RESIDUAL(BFloat16, int8_t)
DEFINE_RESIDUAL(Half, int8_t)
DEFINE_RESIDUAL(float, int16_t)
DEFINE_RESIDUAL(BFloat16, int16_t)
DEFINE_RESIDUAL(Half, int16_t)
DEFINE_BACKWARD(int16_t, float, Codes)
DEFINE_BACKWARD(int16_t, BFloat16, Codes)
DEFINE_BACKWARD(int16_t, Half, Codes)

}  // namespace qtk
