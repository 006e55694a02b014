// The inner loops over tiles that gather statistics; tiles as in fake_quantize_loops.h.
#pragma once

#include <cstdint>

#include "simd.h"

namespace qtk {

// Smallest and largest number of each scale, and whether there was a NaN (not 0).
struct Extremes {
  float* low;
  float* high;
  uint32_t* nan;
};

// `count` bins for each scale: x is in number floor(x * unit) - first, where unit is a power of two and first a whole
// number; what is in no bin is not counted.
struct Bins {
  const float* first;
  const float* unit;
  int64_t count;
};

constexpr int64_t SLOTS = 1024;
constexpr int64_t TABLES = 4;  // tables of counts used in turn, so that an increment need not wait for the one before

#define QTK_DECLARE_STATISTICS(T)                                                      \
  void min_max_rows(const T* x, int64_t rows, int64_t width, Extremes into);           \
  void min_max_columns(const T* x, int64_t rows, int64_t width, Extremes into);        \
  /* Bin of each of n <= SLOTS elements; bins.count + 1 for one that is not counted */ \
  void find_bins_row(const T* x, int64_t n, Bins bins, int32_t* slots);                \
  void find_bins_columns(const T* x, int64_t n, Bins bins, int32_t* slots);            \
  /* Adds the numbers of elements in each bin to those of TABLES tables; a table is    \
     one count a bin, one that stays empty, and that of what is not counted */         \
  void count_row(const T* x, int64_t n, Bins bins, uint32_t* tables);                  \
  void count_row_and_extremes(const T* x, int64_t n, Bins bins, uint32_t* tables, Extremes into);

QTK_DECLARE_STATISTICS(float)
QTK_DECLARE_STATISTICS(BFloat16)
QTK_DECLARE_STATISTICS(Half)

}  // namespace qtk
