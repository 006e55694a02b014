// Runs every inner loop of csrc on the same numbers and prints a hash of what each computes, so that builds for
// several processors can be compared. Compiled and run by test_loops.py. A NaN counts as one number, whatever its bits.
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "candidate_errors_loops.h"
#include "coordinate_descent_loops.h"
#include "fake_quantize_loops.h"
#include "feedback_rounding_loops.h"
#include "least_output_error_loops.h"
#include "statistics_loops.h"

using namespace qtk;

namespace {

constexpr int64_t ROWS = 7, WIDTH = 1037, SIZE = ROWS * WIDTH;  // rows that no register divides

uint32_t random_bits() {
  static uint64_t state = 1;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<uint32_t>(state >> 33);
}

float random_number() { return static_cast<float>(random_bits() % 200001) / 10000.0f - 10.0f; }  // many are ties

uint64_t hash_of(uint64_t hash, uint64_t bits) { return (hash ^ bits) * 1099511628211ull; }

template <class Number>
uint64_t bits_of(Number number) {
  if constexpr (std::is_same_v<Number, BFloat16> || std::is_same_v<Number, Half>) {
    return load(number) != load(number) ? 0x7fff7fffu : number.bits;
  } else if constexpr (std::is_floating_point_v<Number>) {
    if (number != number) {
      return 0x7fff7fffu;
    }
    uint64_t bits = 0;
    std::memcpy(&bits, &number, sizeof(number));
    return bits;
  } else {
    return static_cast<uint64_t>(number);
  }
}

template <class... Numbers>
void print(const std::string& name, const std::vector<Numbers>&... results) {
  uint64_t hash = 14695981039346656037ull;
  ((void)[&] {
    for (const auto number : results) {
      hash = hash_of(hash, bits_of(number));
    }
  }(), ...);
  std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash));
}

template <class T>
std::vector<T> tensor(bool with_specials = true) {
  std::vector<T> numbers(SIZE);
  for (int64_t i = 0; i < SIZE; ++i) {
    store(random_number(), &numbers[i]);
  }
  if (with_specials) {
    const float infinity = std::numeric_limits<float>::infinity();
    const float specials[] = {0.0f, -0.0f, infinity, -infinity, std::numeric_limits<float>::quiet_NaN(), 1e-40f, 3e38f};
    for (int64_t i = 0; i < 7; ++i) {
      store(specials[i], &numbers[i * 131]);
    }
  }
  return numbers;
}

std::vector<float> positive(int64_t count) {
  std::vector<float> numbers(count);
  for (float& number : numbers) {
    number = static_cast<float>(random_bits() % 1000 + 1) / 4096.0f;
  }
  return numbers;
}

std::vector<float> whole(int64_t count) {
  std::vector<float> numbers(count);
  for (float& number : numbers) {
    number = static_cast<float>(random_bits() % 5);
  }
  return numbers;
}

template <class T, class Grid>
void run_fake_quantize(const std::string& name, Grid grid) {
  const std::vector<T> x = tensor<T>(), g = tensor<T>(false);
  const std::vector<float> scale = positive(WIDTH), zero = whole(WIDTH);
  const Scales scales{scale.data(), zero.data()}, symmetric{scale.data(), nullptr};
  std::vector<T> y(SIZE), z(SIZE);
  fake_quantize_rows(x.data(), y.data(), ROWS, WIDTH, scales, grid);
  fake_quantize_rows(x.data(), z.data(), ROWS, WIDTH, symmetric, grid);
  print(name + " rows", y, z);
  for (const int64_t width : {16, 32, 700}) {  // pairs of elements, in several rows or a part of one at a time
    fake_quantize_rows(x.data(), y.data(), SIZE / width, width, scales, grid);
    fake_quantize_columns(x.data(), z.data(), SIZE / width, width, scales, grid);
    print(name + " rows of " + std::to_string(width), y, z);
  }
  fake_quantize_columns(x.data(), y.data(), ROWS, WIDTH, scales, grid);
  print(name + " columns", y);
  pass_rows(x.data(), g.data(), y.data(), ROWS, WIDTH, scales, grid);
  pass_columns(x.data(), g.data(), z.data(), ROWS, WIDTH, scales, grid);
  print(name + " pass", y, z);
  std::vector<double> of_scale(ROWS), clipped(ROWS);
  backward_rows(x.data(), g.data(), y.data(), ROWS, WIDTH, scales, grid, Sums<double>{of_scale.data(), clipped.data()});
  print(name + " backward rows", y, of_scale, clipped);
  const std::vector<T> finite = tensor<T>(false);
  std::vector<float> sum(WIDTH), clipped_sum(WIDTH);
  backward_columns(
      finite.data(), g.data(), y.data(), ROWS, WIDTH, scales, grid, Sums<float>{sum.data(), clipped_sum.data()});
  print(name + " backward columns", y, sum, clipped_sum);
}

template <class T, class R>
void run_residual(const std::string& name) {
  const Codes grid{-8.0f, 7.0f};
  const std::vector<T> x = tensor<T>(), g = tensor<T>(false);
  const std::vector<float> scale = positive(WIDTH), zero = whole(WIDTH);
  const Scales scales{scale.data(), zero.data()};
  std::vector<T> y(SIZE), dx(SIZE);
  std::vector<R> r(SIZE), by_column(SIZE);
  fake_quantize_rows(x.data(), y.data(), r.data(), ROWS, WIDTH, scales, grid);
  fake_quantize_columns(x.data(), y.data(), by_column.data(), ROWS, WIDTH, scales, grid);
  pass_residual(r.data(), g.data(), dx.data(), SIZE);
  print(name, y, r, by_column, dx);
  if constexpr (std::is_same_v<R, int16_t>) {
    std::vector<double> of_scale(ROWS), clipped(ROWS);
    backward_rows(r.data(), g.data(), dx.data(), ROWS, WIDTH, scales, grid, {of_scale.data(), clipped.data()});
    print(name + " backward rows", dx, of_scale, clipped);
    std::vector<float> sum(WIDTH), clipped_sum(WIDTH);
    backward_columns(
        by_column.data(), g.data(), dx.data(), ROWS, WIDTH, scales, grid, {sum.data(), clipped_sum.data()});
    print(name + " backward columns", dx, sum, clipped_sum);
  }
}

template <class T>
void run_statistics(const std::string& name) {
  const std::vector<T> x = tensor<T>();
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> low(WIDTH, infinity), high(WIDTH, -infinity);
  std::vector<uint32_t> nan(WIDTH);
  min_max_rows(x.data(), ROWS, WIDTH, {low.data(), high.data(), nan.data()});
  min_max_columns(x.data(), ROWS, WIDTH, {low.data(), high.data(), nan.data()});
  print(name + " min_max", low, high, nan);
  const std::vector<float> first(SLOTS, -20.0f), unit(SLOTS, 2.0f), wide(SLOTS, 0.25f);
  std::vector<int32_t> slots(SLOTS), by_column(SLOTS);
  find_bins_row(x.data(), SLOTS, {first.data(), wide.data(), 40}, slots.data());
  find_bins_columns(x.data(), SLOTS, {first.data(), unit.data(), 40}, by_column.data());
  print(name + " find_bins", slots, by_column);
  for (const float* unit_of_row : {unit.data(), wide.data()}) {
    std::vector<uint32_t> tables(TABLES * 42);
    count_row(x.data(), SIZE, {first.data(), unit_of_row, 40}, tables.data());
    print(name + " count_row", tables);
  }
}

template <class Real>
void run_searches(const std::string& name) {
  const std::vector<float> numbers = tensor<float>(false);
  const std::vector<Real> x(numbers.begin(), numbers.end());
  constexpr int64_t COUNT = 5;
  const std::vector<float> scale = positive(COUNT * WIDTH), zero = whole(COUNT * WIDTH);
  const std::vector<Real> scales(scale.begin(), scale.end()), zeros(zero.begin(), zero.end());
  for (const bool squared : {true, false}) {
    const Measure<Real> measure{squared ? nullptr : x.data(), Real(-8), Real(7), Real(3), squared};
    std::vector<double> sums(COUNT * WIDTH), by_column(COUNT * WIDTH);
    errors_rows(x.data(), ROWS, WIDTH, Candidates<Real>{scales.data(), zeros.data(), sums.data(), COUNT, ROWS}, measure);
    errors_columns(
        x.data(), ROWS, WIDTH, Candidates<Real>{scales.data(), zeros.data(), by_column.data(), COUNT, WIDTH}, measure);
    print(name + " errors", sums, by_column);
  }
  constexpr int64_t COLUMNS = 61;
  std::vector<Real> rounded(x.begin(), x.begin() + COLUMNS), change(x.begin() + 100, x.begin() + 100 + COLUMNS);
  std::vector<Real> gradient(x.begin() + 200, x.begin() + 200 + COLUMNS), step(COLUMNS, Real(0.25));
  const std::vector<Real> gram(x.begin() + 300, x.begin() + 300 + COLUMNS * COLUMNS);
  const std::vector<int32_t> zero_points(COLUMNS * STRIP, 3);
  descend(Output<Real>{rounded.data(), change.data(), gradient.data(), gram.data(), step.data(), scale.data(),
                       zero_points.data(), COLUMNS}, Codes{-8.0f, 7.0f});
  print(name + " descend", rounded, change, gradient);
  for (const bool backwards : {false, true}) {
    std::vector<Real> target(x.begin(), x.begin() + STRIP * COLUMNS), moves(STRIP * COLUMNS);
    std::vector<Real> space(2 * COLUMNS * STRIP);
    round_strip(Strip<Real>{target.data(), moves.data(), gram.data(), scale.data(), zero_points.data(), STRIP - 3,
                            COLUMNS, COLUMNS, COLUMNS, COLUMNS, backwards}, Codes{-8.0f, 7.0f}, space.data());
    print(name + " round_strip", target, moves);
  }
}

template <class T>
void run_choices(const std::string& name) {
  constexpr int64_t COUNT = 19;  // more candidates than are summed together
  const std::vector<T> x = tensor<T>(false), with_nan = tensor<T>();
  std::vector<float> scale = positive(COUNT * ROWS), zero = whole(COUNT * ROWS);
  for (float& each : scale) {
    each = 1.0f + each;  // about where codes of 4 bits cover ±10
  }
  const ErrorWeights weights{-8.0f, 7.0f, 2.0, 6.0};
  for (const float* zeros : {static_cast<const float*>(nullptr), static_cast<const float*>(zero.data())}) {
    std::vector<int64_t> index(ROWS), narrow(ROWS), nan(ROWS);
    const RangeCandidates candidates{scale.data(), zeros, COUNT, ROWS};
    least_output_error_rows(x.data(), ROWS, WIDTH, candidates, weights, index.data());
    least_output_error_rows(x.data(), ROWS, 31, candidates, weights, narrow.data());
    least_output_error_rows(with_nan.data(), ROWS, WIDTH, candidates, weights, nan.data());
    print(name + (zeros ? " choices, shifted" : " choices"), index, narrow, nan);
  }
  const std::vector<double> scales(scale.begin(), scale.end()), shifts(zero.begin(), zero.end());
  std::vector<double> bounds(COUNT), errors(COUNT);
  const Measure<double> measure{nullptr, -8.0, 7.0, 3.0, true};
  row_bounds(x.data(), WIDTH, {scales.data(), shifts.data(), bounds.data(), COUNT}, measure);
  for (int64_t candidate = 0; candidate < COUNT; ++candidate) {
    errors[candidate] = row_error(x.data(), WIDTH, scales[candidate], shifts[candidate], measure,
                                  std::numeric_limits<double>::infinity());
  }
  print(name + " row errors", bounds, errors);
}

template <class T>
void run_for(const std::string& name) {
  run_fake_quantize<T>(name + " codes", Codes{-128.0f, 127.0f});
  run_fake_quantize<T>(name + " fp8", SmallFloats{-448.0f, 448.0f, 121, 3});
  run_residual<T, int8_t>(name + " int8 residual");
  run_residual<T, int16_t>(name + " int16 residual");
  run_statistics<T>(name);
  run_choices<T>(name);
}

}  // namespace

int main() {
  run_for<float>("float");
  run_for<BFloat16>("bfloat16");
  run_for<Half>("half");
  run_searches<float>("float");
  run_searches<double>("double");
}
