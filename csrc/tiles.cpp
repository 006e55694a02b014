#include "tiles.h"

#include <numeric>

namespace qtk {

Tiles::Tiles(const at::Tensor& x, at::IntArrayRef block_size, int64_t scales) {
  const int64_t rank = x.dim();
  TORCH_CHECK_VALUE(
      block_size.empty() || static_cast<int64_t>(block_size.size()) == rank, "block sizes ", block_size,
      " do not fit a tensor of ", rank, " axes");
  std::vector<int64_t> blocks(rank), steps(rank);
  int64_t count = 1;
  for (int64_t axis = rank; axis-- > 0;) {
    const int64_t size = x.size(axis);
    const int64_t wanted = block_size.empty() ? -1 : block_size[axis];
    blocks[axis] = wanted == -1 ? std::max<int64_t>(size, 1) : wanted;
    TORCH_CHECK_VALUE(
        blocks[axis] > 0 && size % blocks[axis] == 0, "blocks of ", wanted, " do not divide axis ", axis,
        " of length ", size);
    steps[axis] = count;
    count *= size / blocks[axis];
  }
  TORCH_CHECK_VALUE(x.numel() == 0 || count == scales, "there are ", scales, " scales for ", count, " blocks");
  std::vector<int64_t> order(rank);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x.stride(a) > x.stride(b); });
  for (const int64_t axis : order) {
    append(x.size(axis) / blocks[axis], steps[axis]);
    append(blocks[axis], 0);
  }
  if (axes_.empty() || axes_.back().step > 1) {
    axes_.push_back({1, 0});
  }
}

void Tiles::append(int64_t size, int64_t step) {
  if (size == 1) {
    return;
  }
  if (!axes_.empty() && axes_.back().step == step * size) {
    axes_.back() = {axes_.back().size * size, step};
  } else {
    axes_.push_back({size, step});
  }
}

}  // namespace qtk
