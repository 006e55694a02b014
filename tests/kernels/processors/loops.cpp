// Runs every inner loop on made-up numbers and prints a checksum of the bits of what it writes.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "candidate_errors_loops.h"
#include "coordinate_descent_loops.h"
#include "fake_quantize_loops.h"
#include "feedback_rounding_loops.h"
#include "statistics_loops.h"

namespace {

uint64_t state = 1;

// In [0, 1), from a linear congruential generator.
double uniform() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<double>(state >> 40) / (1 << 24);
}

template <class T>
std::vector<T> numbers(int64_t count, double low = -4, double high = 4) {
  std::vector<T> found(count);
  for (T& number : found) {
    if constexpr (std::is_same_v<T, double>) {
      number = low + (high - low) * uniform();
    } else {
      qtk::store(static_cast<float>(low + (high - low) * uniform()), &number);
    }
  }
  return found;
}

template <class T>
void print(const char* what, const std::vector<T>& found) {
  uint64_t sum = 14695981039346656037u;
  std::vector<unsigned char> bytes(found.size() * sizeof(T));
  std::memcpy(bytes.data(), found.data(), bytes.size());
  for (unsigned char byte : bytes) {
    sum = (sum ^ byte) * 1099511628211u;
  }
  std::printf("%s %016llx\n", what, static_cast<unsigned long long>(sum));
}

constexpr int64_t ROWS = 13, WIDTH = 197, COUNT = ROWS * WIDTH;

template <class T, class Grid>
void fake_quantize(Grid grid) {
  const auto x = numbers<T>(COUNT, -9, 9), g = numbers<T>(COUNT);
  const auto scale = numbers<float>(WIDTH, 0.01, 1), zero = std::vector<float>(WIDTH, 3.0f);
  const qtk::Scales scales{scale.data(), zero.data()};
  std::vector<T> y(COUNT), dx(COUNT);
  qtk::fake_quantize_rows(x.data(), y.data(), ROWS, WIDTH, scales, grid);
  print("fake_quantize_rows", y);
  qtk::fake_quantize_columns(x.data(), y.data(), ROWS, WIDTH, scales, grid);
  print("fake_quantize_columns", y);
  qtk::pass_rows(x.data(), g.data(), dx.data(), ROWS, WIDTH, scales, grid);
  print("pass_rows", dx);
  qtk::pass_columns(x.data(), g.data(), dx.data(), ROWS, WIDTH, scales, grid);
  print("pass_columns", dx);
  std::vector<double> of_scale(ROWS), clipped(ROWS);
  qtk::backward_rows(x.data(), g.data(), dx.data(), ROWS, WIDTH, scales, grid, {of_scale.data(), clipped.data()});
  print("backward_rows", of_scale);
  print("backward_rows", clipped);
  std::vector<float> of_columns(WIDTH), clipped_columns(WIDTH);
  qtk::backward_columns(
      x.data(), g.data(), dx.data(), ROWS, WIDTH, scales, grid, {of_columns.data(), clipped_columns.data()});
  print("backward_columns", of_columns);
  print("backward_columns", dx);
}

template <class T>
void statistics() {
  const auto x = numbers<T>(COUNT);
  std::vector<float> low(WIDTH, 9), high(WIDTH, -9);
  std::vector<uint32_t> nan(WIDTH);
  qtk::min_max_rows(x.data(), ROWS, WIDTH, {low.data(), high.data(), nan.data()});
  print("min_max_rows", low);
  qtk::min_max_columns(x.data(), ROWS, WIDTH, {low.data(), high.data(), nan.data()});
  print("min_max_columns", high);
  const auto first = std::vector<float>(WIDTH, -16), unit = std::vector<float>(WIDTH, 4);
  const qtk::Bins bins{first.data(), unit.data(), 32};
  std::vector<int32_t> slots(WIDTH);
  qtk::find_bins_row(x.data(), WIDTH, bins, slots.data());
  print("find_bins_row", slots);
  qtk::find_bins_columns(x.data(), WIDTH, bins, slots.data());
  print("find_bins_columns", slots);
  std::vector<uint32_t> tables(qtk::TABLES * (bins.count + 2));
  qtk::count_row(x.data(), COUNT, bins, tables.data());
  print("count_row", tables);
}

template <class Real>
void candidate_errors() {
  const auto x = numbers<Real>(COUNT), weights = numbers<Real>(COUNT, 0, 1), scale = numbers<Real>(3 * WIDTH, 0.1, 1);
  const std::vector<Real> zero(3 * WIDTH);
  for (const bool squared : {false, true}) {
    for (const Real* of : {static_cast<const Real*>(nullptr), weights.data()}) {
      std::vector<double> sums(3 * WIDTH);
      const qtk::Candidates<Real> candidates{scale.data(), zero.data(), sums.data(), 3, WIDTH};
      qtk::errors_rows(x.data(), ROWS, WIDTH, candidates, {of, -8, 7, 3, squared});
      qtk::errors_columns(x.data(), ROWS, WIDTH, candidates, {of, -8, 7, 3, squared});
      print("candidate_errors", sums);
    }
  }
}

template <class Real>
void rounding() {
  constexpr int64_t LANES = 21, COLUMNS = 45;
  auto target = numbers<Real>(LANES * COLUMNS), change = target;
  const auto feedback = numbers<Real>(COLUMNS * COLUMNS, -0.1, 0.1);
  const auto scale = numbers<float>(LANES * COLUMNS, 0.1, 1);
  const std::vector<int32_t> zero(LANES * COLUMNS, 2);
  for (const bool backwards : {false, true}) {
    std::vector<Real> space(2 * COLUMNS * qtk::STRIP);
    qtk::round_strip(
        qtk::Strip<Real>{target.data(), change.data(), feedback.data(), scale.data(), zero.data(), LANES, COLUMNS,
                         COLUMNS, COLUMNS, COLUMNS, backwards},
        {-8, 7}, space.data());
    print("round_strip", change);
  }
  auto rounded = numbers<Real>(COLUMNS), moved = numbers<Real>(COLUMNS), slope = numbers<Real>(COLUMNS);
  const auto step = numbers<Real>(COLUMNS, 0.5, 1);
  qtk::descend(
      {rounded.data(), moved.data(), slope.data(), feedback.data(), step.data(), scale.data(), zero.data(), COLUMNS},
      {-8, 7});
  print("descend", rounded);
  print("descend", slope);
}

}  // namespace

int main() {
  const qtk::Codes codes{-8, 7};
  const qtk::SmallFloats floats{-448, 448, 121, 3};
  fake_quantize<float>(codes);
  fake_quantize<qtk::BFloat16>(codes);
  fake_quantize<qtk::Half>(codes);
  fake_quantize<float>(floats);
  statistics<float>();
  statistics<qtk::BFloat16>();
  statistics<qtk::Half>();
  candidate_errors<float>();
  candidate_errors<double>();
  rounding<float>();
  rounding<double>();
}
