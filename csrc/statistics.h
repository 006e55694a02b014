// qtk::min_max, as in qtk/ops/statistics.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace qtk {

std::tuple<at::Tensor, at::Tensor> min_max_cpu(const at::Tensor& input, at::IntArrayRef block_size, int64_t scales);

}  // namespace qtk
