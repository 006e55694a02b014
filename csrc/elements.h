// Access to tensor elements by dtype, for the inner loops.
#pragma once

#include <ATen/core/Tensor.h>

#include "simd.h"

namespace qtk {

constexpr int64_t GRAIN = 32768;  // fewest elements per thread

inline bool has_loops(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

// Calls run(T{}) with the type of the elements.
template <class Run>
void by_type(at::ScalarType type, Run run) {
  switch (type) {
    case at::kFloat:
      return run(float{});
    case at::kBFloat16:
      return run(BFloat16{});
    default:
      return run(Half{});
  }
}

// The elements of x without gaps: x itself or a copy.
inline at::Tensor dense(const at::Tensor& x) { return x.is_non_overlapping_and_dense() ? x : x.contiguous(); }

template <class T>
const T* source(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* target(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

}  // namespace qtk
