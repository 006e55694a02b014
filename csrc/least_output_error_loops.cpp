#include "least_output_error_loops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "affine.h"

namespace qtk {
namespace {

constexpr int LANES = 16;         // sums are kept apart by lane, so that the compiler need not reorder them
constexpr int64_t STRETCH = 512;  // elements summed in float before they are added in double

// Bound of the relative error of a sum of STRETCH floats by lanes: each is in STRETCH / LANES + 4 additions.
constexpr double LOST = (STRETCH / LANES + 4) * 0x1p-24;

struct ChangeSums {
  double squares = 0, changes = 0, products = 0;
};

// The sum of all lanes, by halves.
template <class Sum>
INLINE double total(Sum* lanes) {
  for (int half = LANES / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

// Adds the sums over n elements. Products are float32 in either kind of sums.
template <class Sum>
INLINE void add(const float* x, int64_t n, float scale, float zero, Codes grid, ChangeSums* into) {
  Sum squares[LANES] = {}, changes[LANES] = {}, products[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int lane = 0; lane < LANES; ++lane) {
      const float value = x[i + lane], change = value - fake_quantized(value, scale, zero, grid);
      squares[lane] += change * change;
      changes[lane] += change;
      products[lane] += change * value;
    }
  }
  for (int lane = 0; i < n; ++i, ++lane) {
    const float change = x[i] - fake_quantized(x[i], scale, zero, grid);
    squares[lane] += change * change;
    changes[lane] += change;
    products[lane] += change * x[i];
  }
  into->squares += total(squares);
  into->changes += total(changes);
  into->products += total(products);
}

INLINE double power_of(const float* x, int64_t n) {
  double squares[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int lane = 0; lane < LANES; ++lane) {
      squares[lane] += x[i + lane] * x[i + lane];
    }
  }
  for (int lane = 0; i < n; ++i, ++lane) {
    squares[lane] += x[i] * x[i];
  }
  return total(squares);
}

// The row, a stretch at a time as floats.
template <class T, class Visit>
INLINE void in_stretches(const T* x, int64_t width, Visit visit) {
  float values[STRETCH];
  for (int64_t begin = 0; begin < width; begin += STRETCH) {
    const int64_t n = std::min(STRETCH, width - begin);
    load_all(x + begin, n, values);
    visit(values, n);
  }
}

// Candidates that may be the least by sums in float are compared by sums in double.
template <class T>
INLINE void least(const T* x, int64_t rows, int64_t width, RangeCandidates of, ErrorWeights weights, int64_t* index) {
  const Codes grid{weights.qmin, weights.qmax};
  const double slack = 2 * LOST * (1 + 2 * weights.mean + 2 * weights.gain);
  std::vector<ChangeSums> sums(of.count);
  std::vector<int64_t> close;
  for (int64_t row = 0; row < rows; ++row, x += width) {
    double power = 0;
    const auto error = [&](int64_t c) {
      const ChangeSums& own = sums[c];
      return own.squares + weights.mean * (own.changes * own.changes / width) +
             weights.gain * (own.products * own.products / power);
    };
    const auto add_to = [&](auto kind, int64_t c, const float* values, int64_t n) __attribute__((always_inline)) {
      const int64_t at = c * of.stride + row;
      add<decltype(kind)>(values, n, of.scale[at], of.zero == nullptr ? 0.0f : of.zero[at], grid, &sums[c]);
    };
    std::fill(sums.begin(), sums.end(), ChangeSums{});
    in_stretches(x, width, [&](const float* values, int64_t n) __attribute__((always_inline)) {
      power += power_of(values, n);
      for (int64_t c = 0; c < of.count; ++c) {
        add_to(float{}, c, values, n);
      }
    });
    double bound = std::numeric_limits<double>::infinity();
    for (int64_t c = 0; c < of.count; ++c) {
      bound = std::min(bound, error(c) + slack * sums[c].squares);
    }
    close.clear();
    for (int64_t c = 0; c < of.count; ++c) {
      if (!(error(c) - slack * sums[c].squares > bound)) {  // a NaN is compared too
        close.push_back(c);
      }
    }
    index[row] = close.front();
    if (close.size() == 1) {
      continue;
    }
    std::fill(sums.begin(), sums.end(), ChangeSums{});
    in_stretches(x, width, [&](const float* values, int64_t n) __attribute__((always_inline)) {
      for (const int64_t c : close) {
        add_to(double{}, c, values, n);
      }
    });
    for (const int64_t c : close) {  // the first NaN wins, as in torch.argmin
      const double least = error(index[row]);
      index[row] = least == least && !(error(c) >= least) ? c : index[row];
    }
  }
}

}  // namespace

#define DEFINE(T)                                                                                           \
  FOR_EVERY_CPU void least_output_error_rows(                                                               \
      const T* x, int64_t rows, int64_t width, RangeCandidates of, ErrorWeights weights, int64_t* index) {  \
    least(x, rows, width, of, weights, index);                                                              \
  }

DEFINE(float)
DEFINE(BFloat16)
DEFINE(Half)

}  // namespace qtk
