// Maps elements to scales: the elements of a dense tensor in memory order, cut into tiles.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace qtk {

// A tile is `rows` times `width` elements from `offset` on. Its row r has scale `index + r`; if there are scales by
// column, its column c has scale `index + c` instead.
struct Tile {
  int64_t offset, rows, width, index;
};

class Tiles {
 public:
  // x: dense, in any order of its axes. block_size: empty for one scale, else an entry an axis: 1 for one index, -1 for
  // the whole axis, n for blocks of n. Throws if the blocks do not fit x, or their number is not `scales`.
  Tiles(const at::Tensor& x, at::IntArrayRef block_size, int64_t scales);

  bool by_column() const { return axes_.back().step == 1; }

  // Elements of a whole row.
  int64_t width() const { return axes_.back().size; }

  // Whether there is one scale per row, and rows have consecutive scales.
  bool one_row_a_scale() const { return !by_column() && (axes_.size() == 1 || (axes_.size() == 2 && stacked())); }

  // Calls visit(tile) until [begin, end) is covered.
  template <class Visit>
  void each(int64_t begin, int64_t end, Visit visit) const {
    for (int64_t row = begin / width(); begin < end;) {
      const int64_t within = begin - row * width();
      const int64_t whole = within > 0 ? 0 : std::min((end - begin) / width(), stack(row));
      const int64_t rows = std::max<int64_t>(whole, 1);
      const int64_t width_here = whole > 0 ? width() : std::min(width() - within, end - begin);
      visit(Tile{begin, rows, width_here, first_scale(row) + (by_column() ? within : 0)});
      begin += rows * width_here;
      row += rows;
    }
  }

 private:
  struct Axis {
    int64_t size;
    int64_t step;  // from the scale of one index to that of the next; 0: the same
  };

  // Whether consecutive rows form one tile.
  bool stacked() const { return axes_.size() > 1 && axes_[axes_.size() - 2].step == (by_column() ? 0 : 1); }

  // Number of rows from this one on that form one tile.
  int64_t stack(int64_t row) const {
    const int64_t size = stacked() ? axes_[axes_.size() - 2].size : 1;
    return size - row % size;
  }

  int64_t first_scale(int64_t row) const {
    int64_t index = 0;
    for (size_t axis = axes_.size() - 1; axis-- > 0;) {
      index += row % axes_[axis].size * axes_[axis].step;
      row /= axes_[axis].size;
    }
    return index;
  }

  void append(int64_t size, int64_t step);

  std::vector<Axis> axes_;  // outermost in memory first; the innermost, the row, has step 0 or 1
};

}  // namespace qtk
