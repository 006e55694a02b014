#include "candidate_errors_loops.h"

#include <algorithm>
#include <cmath>

namespace qtk {
namespace {

constexpr int LANES = 32;          // sums are kept apart by lane, so that the compiler need not reorder them
constexpr int64_t STRETCH = 4096;  // elements summed in float before they are added in double; they fit the L1 cache
constexpr int64_t STRIP = 64;      // columns whose sums stay in registers or the L1 cache
constexpr int64_t FEWEST = 64;     // elements near the ends of a row whose errors bound a sum, and a 16th of the row
constexpr double NEAR = 0.75;      // from which part of the largest magnitude on elements are near an end

template <bool SQUARED, bool WEIGHTED, class Real>
INLINE Real error(Real x, Real weight, Real scale, Real zero, const Measure<Real>& measure) {
  const Real code = std::nearbyint(x / scale) + zero;
  const Real raised = measure.qmin > code ? measure.qmin : code;
  const Real nearest = measure.qmax < raised ? measure.qmax : raised;
  const Real off = x - (nearest - zero) * scale;
  const Real size = (SQUARED ? off * off : std::abs(off)) * (nearest == code ? Real(1) : measure.clipped);
  return WEIGHTED ? size * weight : size;
}

INLINE double load(double value) { return value; }

template <bool SQUARED, bool WEIGHTED, class Real, class T>
INLINE Real sum_of(const T* x, const Real* weights, int64_t n, Real scale, Real zero, const Measure<Real>& measure) {
  Real lanes[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int lane = 0; lane < LANES; ++lane) {
      lanes[lane] += error<SQUARED, WEIGHTED, Real>(
          load(x[i + lane]), WEIGHTED ? weights[i + lane] : 0, scale, zero, measure);
    }
  }
  Real sum = 0;
  for (; i < n; ++i) {
    sum += error<SQUARED, WEIGHTED, Real>(load(x[i]), WEIGHTED ? weights[i] : 0, scale, zero, measure);
  }
  for (int half = LANES / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return sum + lanes[0];
}

template <bool SQUARED, bool WEIGHTED, class Real>
INLINE void rows_of(const Real* x, int64_t rows, int64_t width, const Candidates<Real>& of, const Measure<Real>& measure) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t begin = 0; begin < width; begin += STRETCH) {
      const int64_t n = std::min(STRETCH, width - begin), from = row * width + begin;
      const Real* weights = WEIGHTED ? measure.weights + from : nullptr;
      for (int64_t candidate = 0; candidate < of.count; ++candidate) {
        const int64_t at = candidate * of.stride + row;
        of.sums[at] += sum_of<SQUARED, WEIGHTED>(x + from, weights, n, of.scale[at], of.zero[at], measure);
      }
    }
  }
}

template <bool SQUARED, bool WEIGHTED, class Real>
INLINE void strip_of(
    const Real* x, const Real* weights, int64_t rows, int64_t width, int64_t columns, const Real* __restrict scale,
    const Real* __restrict zero, double* sums, const Measure<Real>& measure) {
  Real lanes[STRIP] = {};
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < columns; ++i) {
      const int64_t at = row * width + i;
      lanes[i] += error<SQUARED, WEIGHTED>(x[at], WEIGHTED ? weights[at] : 0, scale[i], zero[i], measure);
    }
  }
  for (int64_t i = 0; i < columns; ++i) {
    sums[i] += lanes[i];
  }
}

template <bool SQUARED, bool WEIGHTED, class Real>
INLINE void columns_of(
    const Real* x, int64_t rows, int64_t width, const Candidates<Real>& of, const Measure<Real>& measure) {
  constexpr int64_t DEPTH = STRETCH / STRIP;
  for (int64_t top = 0; top < rows; top += DEPTH) {
    for (int64_t left = 0; left < width; left += STRIP) {
      const int64_t from = top * width + left, depth = std::min(DEPTH, rows - top);
      const Real* weights = WEIGHTED ? measure.weights + from : nullptr;
      for (int64_t candidate = 0; candidate < of.count; ++candidate) {
        const int64_t at = candidate * of.stride + left;
        const auto run = [&](int64_t columns) __attribute__((always_inline)) {
          strip_of<SQUARED, WEIGHTED>(
              x + from, weights, depth, width, columns, of.scale + at, of.zero + at, of.sums + at, measure);
        };
        left + STRIP <= width ? run(STRIP) : run(width - left);
      }
    }
  }
}

template <class T>
INLINE double extreme(const T* x, int64_t n, double sign) {
  double lanes[LANES];
  std::fill(lanes, lanes + LANES, 0.0);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int lane = 0; lane < LANES; ++lane) {
      const double value = sign * load(x[i + lane]);
      lanes[lane] = value > lanes[lane] ? value : lanes[lane];
    }
  }
  for (; i < n; ++i) {
    lanes[0] = std::max(lanes[0], sign * load(x[i]));
  }
  return *std::max_element(lanes, lanes + LANES);
}

template <bool WEIGHTED, class T>
INLINE void bounds_of(const T* x, int64_t width, const RowCandidates& of, const Measure<double>& measure) {
  const double high = NEAR * extreme(x, width, 1), low = -NEAR * extreme(x, width, -1);
  const auto is_near = [&](double value) { return (value > high) | (value < low); };
  int64_t near = 0;
  for (int64_t i = 0; i < width; ++i) {
    near += is_near(load(x[i]));
  }
  const int64_t every = near / (FEWEST + width / 16) + 1;
  std::fill(of.bounds, of.bounds + of.count, 0.0);
  for (int64_t i = 0, seen = 0; i < width; ++i) {
    const double value = load(x[i]);
    if (!is_near(value) || seen++ % every != 0) {
      continue;
    }
    for (int64_t candidate = 0; candidate < of.count; ++candidate) {
      of.bounds[candidate] += error<true, WEIGHTED, double>(
          value, WEIGHTED ? measure.weights[i] : 0, of.scale[candidate], of.zero[candidate], measure);
    }
  }
}

template <bool WEIGHTED, class T>
INLINE double error_of(
    const T* x, int64_t width, double scale, double zero, const Measure<double>& measure, double most) {
  double sum = 0;
  for (int64_t begin = 0; begin < width && !(sum > most); begin += STRETCH) {
    const double* weights = WEIGHTED ? measure.weights + begin : nullptr;
    sum += sum_of<true, WEIGHTED>(x + begin, weights, std::min(STRETCH, width - begin), scale, zero, measure);
  }
  return sum;
}

}  // namespace

#define DEFINE_ROW(T)                                                                                            \
  FOR_EVERY_CPU void row_bounds(const T* x, int64_t width, RowCandidates of, Measure<double> measure) {          \
    measure.weights ? bounds_of<true>(x, width, of, measure) : bounds_of<false>(x, width, of, measure);          \
  }                                                                                                              \
  FOR_EVERY_CPU double row_error(                                                                                \
      const T* x, int64_t width, double scale, double zero, Measure<double> measure, double most) {              \
    return measure.weights ? error_of<true>(x, width, scale, zero, measure, most)                                \
                           : error_of<false>(x, width, scale, zero, measure, most);                              \
  }

DEFINE_ROW(double)
DEFINE_ROW(float)
DEFINE_ROW(BFloat16)
DEFINE_ROW(Half)

#define DEFINE(NAME, Real)                                                                          \
  FOR_EVERY_CPU void errors_##NAME(                                                                 \
      const Real* x, int64_t rows, int64_t width, Candidates<Real> of, Measure<Real> measure) {     \
    if (measure.squared) {                                                                          \
      measure.weights ? NAME##_of<true, true>(x, rows, width, of, measure)                          \
                      : NAME##_of<true, false>(x, rows, width, of, measure);                        \
    } else {                                                                                        \
      measure.weights ? NAME##_of<false, true>(x, rows, width, of, measure)                         \
                      : NAME##_of<false, false>(x, rows, width, of, measure);                       \
    }                                                                                               \
  }

DEFINE(rows, float)
DEFINE(rows, double)
DEFINE(columns, float)
DEFINE(columns, double)

}  // namespace qtk
