#include "least_output_error_loops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "affine.h"

namespace qtk {
namespace {

constexpr int LANES = 16;         // candidates whose float sums are taken together; in double, sums kept apart by lane
constexpr int CHAINS = 2;         // elements whose float sums are kept apart, so that additions wait less for each other
constexpr int64_t STRETCH = 128;  // elements summed in float before they are added in double

// Bound of the relative error of a sum of STRETCH floats by chains.
constexpr double LOST = (STRETCH / CHAINS + 4) * 0x1p-24;

struct ChangeSums {
  double squares = 0, changes = 0, products = 0;
};

// The candidates of one row, filled up with ones.
struct Lanes {
  float scale[LANES], zero[LANES];
};

template <bool SHIFTED>
INLINE float change_of(float x, float scale, float zero, Codes grid) {
  return x - (SHIFTED ? fake_quantized(x, scale, zero, grid)
                      : clamped(std::nearbyint(x / scale), grid.qmin, grid.qmax) * scale);
}

template <bool FUSED>
INLINE void add_product(float a, float b, float* sum) {
  *sum = FUSED ? std::fma(a, b, *sum) : *sum + a * b;
}

// Adds the sums over n elements of `count` candidates, in float.
template <bool SHIFTED, bool FUSED>
INLINE void add_floats(const float* x, int64_t n, const Lanes& of, int64_t count, Codes grid, ChangeSums* into) {
  float squares[CHAINS][LANES] = {}, changes[CHAINS][LANES] = {}, products[CHAINS][LANES] = {};
  const auto visit = [&](float value, int chain) __attribute__((always_inline)) {
    for (int lane = 0; lane < LANES; ++lane) {
      const float change = change_of<SHIFTED>(value, of.scale[lane], of.zero[lane], grid);
      add_product<FUSED>(change, change, squares[chain] + lane);
      changes[chain][lane] += change;
      add_product<FUSED>(change, value, products[chain] + lane);
    }
  };
  int64_t i = 0;
  for (; i + CHAINS <= n; i += CHAINS) {
    for (int chain = 0; chain < CHAINS; ++chain) {
      visit(x[i + chain], chain);
    }
  }
  for (; i < n; ++i) {
    visit(x[i], 0);
  }
  for (int64_t lane = 0; lane < count; ++lane) {
    for (int chain = 0; chain < CHAINS; ++chain) {
      into[lane].squares += squares[chain][lane];
      into[lane].changes += changes[chain][lane];
      into[lane].products += products[chain][lane];
    }
  }
}

// The sum of all lanes, by halves.
INLINE double total(double* lanes) {
  for (int half = LANES / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

// Adds the sums over n elements of one candidate, in double, of changes and products in float.
template <bool SHIFTED>
INLINE void add_doubles(const float* x, int64_t n, float scale, float zero, Codes grid, ChangeSums* into) {
  double squares[LANES] = {}, changes[LANES] = {}, products[LANES] = {};
  const auto visit = [&](float value, int lane) __attribute__((always_inline)) {
    const float change = change_of<SHIFTED>(value, scale, zero, grid);
    squares[lane] += change * change;
    changes[lane] += change;
    products[lane] += change * value;
  };
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int lane = 0; lane < LANES; ++lane) {
      visit(x[i + lane], lane);
    }
  }
  for (int lane = 0; i < n; ++i, ++lane) {
    visit(x[i], lane);
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
template <bool SHIFTED, bool FUSED, class T>
INLINE void least_of(const T* x, int64_t rows, int64_t width, RangeCandidates of, ErrorWeights weights, int64_t* index) {
  const Codes grid{weights.qmin, weights.qmax};
  const double slack = 2 * LOST * (1 + 2 * weights.mean + 2 * weights.gain);
  std::vector<ChangeSums> sums(of.count);
  std::vector<Lanes> lanes((of.count + LANES - 1) / LANES);
  for (Lanes& each : lanes) {
    std::fill(each.scale, each.scale + LANES, 1.0f);
    std::fill(each.zero, each.zero + LANES, 0.0f);
  }
  std::vector<int64_t> close;
  for (int64_t row = 0; row < rows; ++row, x += width) {
    double power = 0;
    const auto error = [&](int64_t c) {
      const ChangeSums& own = sums[c];
      return own.squares + weights.mean * (own.changes * own.changes / width) +
             weights.gain * (own.products * own.products / power);
    };
    std::fill(sums.begin(), sums.end(), ChangeSums{});
    for (int64_t c = 0; c < of.count; ++c) {
      lanes[c / LANES].scale[c % LANES] = of.scale[c * of.stride + row];
      lanes[c / LANES].zero[c % LANES] = SHIFTED ? of.zero[c * of.stride + row] : 0.0f;
    }
    in_stretches(x, width, [&](const float* values, int64_t n) __attribute__((always_inline)) {
      power += power_of(values, n);
      for (int64_t first = 0; first < of.count; first += LANES) {
        add_floats<SHIFTED, FUSED>(
            values, n, lanes[first / LANES], std::min<int64_t>(LANES, of.count - first), grid, sums.data() + first);
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
        const Lanes& own = lanes[c / LANES];
        add_doubles<SHIFTED>(values, n, own.scale[c % LANES], own.zero[c % LANES], grid, &sums[c]);
      }
    });
    for (const int64_t c : close) {  // the first NaN wins, as in torch.argmin
      const double least = error(index[row]);
      index[row] = least == least && !(error(c) >= least) ? c : index[row];
    }
  }
}

template <class T>
INLINE void least(const T* x, int64_t rows, int64_t width, RangeCandidates of, ErrorWeights weights, int64_t* index) {
  const auto run = [&](auto shifted, auto fused) __attribute__((always_inline)) {
    least_of<decltype(shifted)::value, decltype(fused)::value>(x, rows, width, of, weights, index);
  };
  const auto run_shifted = [&](auto fused) __attribute__((always_inline)) {
    of.zero == nullptr ? run(std::false_type{}, fused) : run(std::true_type{}, fused);
  };
  has_fma() ? run_shifted(std::true_type{}) : run_shifted(std::false_type{});
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
