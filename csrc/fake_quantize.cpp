#include "fake_quantize.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

#include "elements.h"
#include "fake_quantize_loops.h"
#include "range.h"
#include "tiles.h"

namespace qtk {
namespace {

constexpr int64_t MOST_CHUNKS = 256;
constexpr int64_t PIECE = 512;  // scales summed at a time

// As check_fit of qtk/numerics/blocks.py: one scale, or one a block in the shape of the blocks, or one an index of the
// axis that is kept.
void check_fit(const Tensor& scale, const Tensor& x, at::IntArrayRef block_size) {
  if (block_size.empty()) {
    return;  // Tiles has checked that there is one scale
  }
  bool fits = true;
  if (scale.dim() == x.dim()) {
    for (int64_t axis = 0; axis < x.dim(); ++axis) {
      const int64_t size = block_size[axis];
      fits &= size == -1 ? scale.size(axis) == 1 : scale.size(axis) * size == x.size(axis);
    }
  } else {
    int64_t kept = 0;
    for (int64_t axis = 0; axis < x.dim(); ++axis) {
      fits &= block_size[axis] == -1 || block_size[axis] == 1;
      fits &= block_size[axis] != 1 || (kept < scale.dim() && scale.size(kept++) == x.size(axis));
    }
    fits &= kept == scale.dim();
  }
  TORCH_CHECK_VALUE(
      fits, "scales of shape ", scale.sizes(), " do not lie as blocks of ", block_size, " in a tensor of shape ",
      x.sizes());
}

// The elements of `value` in the order of x.
Tensor ordered_like(const Tensor& value, const Tensor& x) {
  return value.strides() == x.strides() ? value : at::empty_like(x, value.options()).copy_(value);
}

// With a residual, or none.
template <class T, class Grid, class... R>
void forward(
    const Tensor& x, const Tensor& y, const Tiles& tiles, const Range& range, Grid grid, R*... residual) {
  const T* from = source<T>(x);
  T* into = target<T>(y);
  at::parallel_for(0, x.numel(), GRAIN, [&](int64_t begin, int64_t end) {
    tiles.each(begin, end, [&](Tile tile) {
      const auto run = [&](auto loop) {
        loop(from + tile.offset, into + tile.offset, residual + tile.offset..., tile.rows, tile.width,
             range.from(tile.index), grid);
      };
      tiles.by_column() ? run([](auto... a) { fake_quantize_columns(a...); })
                        : run([](auto... a) { fake_quantize_rows(a...); });
    });
  });
}

// Computes the gradients of one tensor; x (or its residual), grad and dx have one memory order, the last two one dtype.
template <class X, class T, class Grid>
class Backward {
 public:
  Backward(const Tensor& x, const Tensor& g, const Tensor& dx, const Tiles& tiles, const Range& range, Grid grid)
      : x_(source<X>(x)), g_(source<T>(g)), dx_(target<T>(dx)), total_(x.numel()), tiles_(tiles), range_(range),
        grid_(grid) {}

  void pass() const {
    at::parallel_for(0, total_, GRAIN, [&](int64_t begin, int64_t end) {
      tiles_.each(begin, end, [&](Tile tile) {
        tiles_.by_column() ? run(tile, [](auto... a) { pass_columns(a...); })
                           : run(tile, [](auto... a) { pass_rows(a...); });
      });
    });
  }

  // Writes the gradients of all scales. The partial sums depend on sizes alone, not on the number of threads.
  void sum(int64_t scales, const Gradient& gradient) const {
    if (total_ > 0 && tiles_.one_row_a_scale() && scales > 1) {
      at::parallel_for(0, scales, std::max<int64_t>(GRAIN / tiles_.width(), 1), [&](int64_t begin, int64_t end) {
        for (; begin < end; begin += PIECE) {
          each_alone(begin, std::min(begin + PIECE, end), gradient);
        }
      });
      return;
    }
    std::vector<double> of_scale(scales), clipped(scales);
    const Sums<double> sums{of_scale.data(), clipped.data()};
    const int64_t chunks = std::clamp<int64_t>(total_ / std::max(GRAIN, 8 * scales), 1, MOST_CHUNKS);
    if (total_ > 0) {
      tiles_.by_column() ? in_chunks<float>(chunks, sums, scales) : in_chunks<double>(chunks, sums, scales);
    }
    range_.write(gradient, 0, scales, sums);
  }

 private:
  template <class Loop, class... Rest>
  void run(Tile tile, Loop loop, Rest... rest) const {
    loop(x_ + tile.offset, g_ + tile.offset, dx_ + tile.offset, tile.rows, tile.width, range_.from(tile.index), grid_,
         rest...);
  }

  // Handles at most PIECE scales with one row each.
  void each_alone(int64_t first, int64_t last, const Gradient& gradient) const {
    std::array<double, PIECE> of_scale{}, clipped{};
    const int64_t width = tiles_.width();
    tiles_.each(first * width, last * width, [&](Tile tile) {
      const int64_t at = tile.index - first;
      const Sums<double> own{of_scale.data() + at, clipped.data() + at};
      run(tile, [](auto... a) { backward_rows(a...); }, own);
    });
    range_.write(gradient, first, last - first, {of_scale.data(), clipped.data()});
  }

  void rows(int64_t begin, int64_t end, Sums<double> sums) const {
    tiles_.each(begin, end, [&](Tile tile) {
      const Sums<double> own{sums.of_scale + tile.index, sums.clipped + tile.index};
      run(tile, [](auto... a) { backward_rows(a...); }, own);
    });
  }

  void columns(int64_t begin, int64_t end, Sums<float> sums) const {
    tiles_.each(begin, end, [&](Tile tile) {
      const Sums<float> own{sums.of_scale + tile.index, sums.clipped + tile.index};
      run(tile, [](auto... a) { backward_columns(a...); }, own);
    });
  }

  template <class Part>
  void in_chunks(int64_t chunks, Sums<double> sums, int64_t scales) const {
    const int64_t length = (total_ + chunks - 1) / chunks;
    std::vector<Part> parts(2 * chunks * scales);
    at::parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk) {
        const int64_t begin = chunk * length, end = std::min(begin + length, total_);
        Part* own = parts.data() + 2 * chunk * scales;
        if constexpr (std::is_same_v<Part, float>) {
          columns(begin, end, {own, own + scales});
        } else {
          rows(begin, end, {own, own + scales});
        }
      }
    });
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const Part* own = parts.data() + 2 * chunk * scales;
      for (int64_t index = 0; index < scales; ++index) {
        sums.of_scale[index] += own[index];
        sums.clipped[index] += own[scales + index];
      }
    }
  }

  const X* x_;
  const T* g_;
  T* dx_;
  int64_t total_;
  const Tiles& tiles_;
  const Range& range_;
  Grid grid_;
};

// Runs run(dense x, y in its order, tiles, range) and returns y in the layout of the input.
template <class Grid, class Run>
Tensor forward_by(
    const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point, at::IntArrayRef block_size, Grid grid,
    Run run) {
  Tensor result = at::empty_like(input);
  const Tensor x = dense(input);
  const Tensor y = result.strides() == x.strides() ? result : at::empty_like(x);
  const Tiles tiles(x, block_size, scale.numel());
  const Range range(scale, zero_point, grid.qmin, grid.qmax, tiles.by_column());
  check_fit(scale, x, block_size);
  run(x, y, tiles, range);
  return y.is_same(result) ? result : result.copy_(y);
}

template <class Grid>
Tensor forward_on(
    const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point, at::IntArrayRef block_size, Grid grid) {
  if (!has_loops(input.scalar_type())) {
    return forward_on(input.to(at::kFloat), scale, zero_point, block_size, grid).to(input.scalar_type());
  }
  const auto run = [&](const Tensor& x, const Tensor& y, const Tiles& tiles, const Range& range) {
    by_type(x.scalar_type(), [&](auto type) { forward<decltype(type)>(x, y, tiles, range, grid); });
  };
  return forward_by(input, scale, zero_point, block_size, grid, run);
}

// Runs run(dense input, gradient and dx in its order, tiles, range, gradient of the range). The input may be a residual.
template <class Grid, class Run>
Gradients backward_by(
    const Tensor& grad, const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point,
    at::IntArrayRef block_size, Grid grid, bool wants_scale, bool wants_zero_point, Run run) {
  Tensor result = at::empty_like(input, grad.options());
  const Tensor x = dense(input);
  const Tensor g = ordered_like(grad, x);
  const Tensor dx = result.strides() == x.strides() ? result : at::empty_like(x, grad.options());
  const Tiles tiles(x, block_size, scale.numel());
  const Range range(scale, zero_point, grid.qmin, grid.qmax, tiles.by_column());
  check_fit(scale, x, block_size);
  const auto gradient_like_scale = [&](bool wanted) {
    return wanted ? at::empty_like(scale, at::MemoryFormat::Contiguous) : at::empty({0}, scale.options());
  };
  const Tensor of_scale = gradient_like_scale(wants_scale), of_zero_point = gradient_like_scale(wants_zero_point);
  const Gradient gradient{
      wants_scale ? of_scale.mutable_data_ptr<float>() : nullptr,
      wants_zero_point ? of_zero_point.mutable_data_ptr<float>() : nullptr};
  run(x, g, dx, tiles, range, gradient);
  return {dx.is_same(result) ? result : result.copy_(dx), of_scale, of_zero_point};
}

void check_shapes(const Tensor& grad, const Tensor& input) {
  TORCH_CHECK_VALUE(
      grad.sizes() == input.sizes(), "a gradient of shape ", grad.sizes(), " is not that of an input of shape ",
      input.sizes());
}

template <class Grid>
Gradients backward_on(
    const Tensor& grad, const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point,
    at::IntArrayRef block_size, Grid grid, bool wants_scale, bool wants_zero_point) {
  check_shapes(grad, input);
  if (!has_loops(input.scalar_type()) || grad.scalar_type() != input.scalar_type()) {
    auto [dx, of_scale, of_zero] = backward_on(
        grad.to(at::kFloat), input.to(at::kFloat), scale, zero_point, block_size, grid, wants_scale, wants_zero_point);
    return {dx.to(grad.scalar_type()), of_scale, of_zero};
  }
  const auto run = [&](const Tensor& x, const Tensor& g, const Tensor& dx, const Tiles& tiles, const Range& range,
                       const Gradient& gradient) {
    by_type(x.scalar_type(), [&](auto type) {
      using T = decltype(type);
      const Backward<T, T, Grid> backward(x, g, dx, tiles, range, grid);
      wants_scale || wants_zero_point ? backward.sum(scale.numel(), gradient) : backward.pass();
    });
  };
  return backward_by(grad, input, scale, zero_point, block_size, grid, wants_scale, wants_zero_point, run);
}

Codes integers(int64_t qmin, int64_t qmax) { return {static_cast<float>(qmin), static_cast<float>(qmax)}; }

// As smallest_exponent of qtk/numerics/minifloat.py.
SmallFloats small_floats(int64_t exponent_bits, int64_t mantissa_bits, double largest) {
  TORCH_CHECK_VALUE(
      exponent_bits >= 1 && exponent_bits <= 7 && mantissa_bits >= 0 && mantissa_bits <= 16,
      "a small float has 1 to 7 bits of exponent and up to 16 of mantissa, got ", exponent_bits, " and ", mantissa_bits);
  const float end = static_cast<float>(largest);
  const int64_t smallest = 127 + 2 - (int64_t{1} << (exponent_bits - 1));
  return {-end, end, static_cast<uint32_t>(smallest), static_cast<uint32_t>(mantissa_bits)};
}

}  // namespace

Tensor fake_quantize_cpu(
    const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point, at::IntArrayRef block_size,
    int64_t qmin, int64_t qmax) {
  return forward_on(input, scale, zero_point, block_size, integers(qmin, qmax));
}

Gradients fake_quantize_backward_cpu(
    const Tensor& grad, const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point,
    at::IntArrayRef block_size, int64_t qmin, int64_t qmax, bool wants_scale, bool wants_zero_point) {
  return backward_on(
      grad, input, scale, zero_point, block_size, integers(qmin, qmax), wants_scale, wants_zero_point);
}

std::tuple<Tensor, Tensor> fake_quantize_with_residual_cpu(
    const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point, at::IntArrayRef block_size,
    int64_t qmin, int64_t qmax, bool learned) {
  if (!has_loops(input.scalar_type())) {
    const auto [y, residual] = fake_quantize_with_residual_cpu(
        input.to(at::kFloat), scale, zero_point, block_size, qmin, qmax, learned);
    return {y.to(input.scalar_type()), residual};
  }
  const Codes grid = integers(qmin, qmax);
  Tensor residual = at::empty_like(input, input.options().dtype(learned ? at::kShort : at::kChar));
  const auto run = [&](const Tensor& x, const Tensor& y, const Tiles& tiles, const Range& range) {
    const Tensor r = residual.strides() == x.strides() ? residual : at::empty_like(x, residual.options());
    by_type(x.scalar_type(), [&](auto type) {
      using T = decltype(type);
      learned ? forward<T>(x, y, tiles, range, grid, target<int16_t>(r))
              : forward<T>(x, y, tiles, range, grid, target<int8_t>(r));
    });
    if (!r.is_same(residual)) {
      residual.copy_(r);
    }
  };
  return {forward_by(input, scale, zero_point, block_size, grid, run), residual};
}

Gradients fake_quantize_residual_backward_cpu(
    const Tensor& grad, const Tensor& residual, const Tensor& scale, const OptionalTensor& zero_point,
    at::IntArrayRef block_size, int64_t qmin, int64_t qmax, bool wants_scale, bool wants_zero_point) {
  check_shapes(grad, residual);
  const bool learned = residual.scalar_type() == at::kShort, wants_sums = wants_scale || wants_zero_point;
  TORCH_CHECK_TYPE(
      learned || residual.scalar_type() == at::kChar, "residuals are int8 or int16, not ", residual.scalar_type());
  TORCH_CHECK_VALUE(
      learned || !wants_sums, "an int8 residual holds no gradient of the range; save one for a learned range");
  if (!has_loops(grad.scalar_type())) {
    auto [dx, of_scale, of_zero] = fake_quantize_residual_backward_cpu(
        grad.to(at::kFloat), residual, scale, zero_point, block_size, qmin, qmax, wants_scale, wants_zero_point);
    return {dx.to(grad.scalar_type()), of_scale, of_zero};
  }
  const Codes grid = integers(qmin, qmax);
  const auto run = [&](const Tensor& r, const Tensor& g, const Tensor& dx, const Tiles& tiles, const Range& range,
                       const Gradient& gradient) {
    by_type(g.scalar_type(), [&](auto type) {
      using T = decltype(type);
      if (wants_sums) {
        return Backward<int16_t, T, Codes>(r, g, dx, tiles, range, grid).sum(scale.numel(), gradient);
      }
      at::parallel_for(0, r.numel(), GRAIN, [&](int64_t begin, int64_t end) {
        const auto pass = [&](auto* from) {
          pass_residual(from + begin, source<T>(g) + begin, target<T>(dx) + begin, end - begin);
        };
        learned ? pass(source<int16_t>(r)) : pass(source<int8_t>(r));
      });
    });
  };
  return backward_by(grad, residual, scale, zero_point, block_size, grid, wants_scale, wants_zero_point, run);
}

Tensor fake_quantize_float_cpu(
    const Tensor& input, const Tensor& scale, at::IntArrayRef block_size, int64_t exponent_bits, int64_t mantissa_bits,
    double largest) {
  const SmallFloats grid = small_floats(exponent_bits, mantissa_bits, largest);
  return forward_on(input, scale, std::nullopt, block_size, grid);
}

std::tuple<Tensor, Tensor> fake_quantize_float_backward_cpu(
    const Tensor& grad, const Tensor& input, const Tensor& scale, at::IntArrayRef block_size, int64_t exponent_bits,
    int64_t mantissa_bits, double largest, bool wants_scale) {
  const SmallFloats grid = small_floats(exponent_bits, mantissa_bits, largest);
  const auto [dx, of_scale, none] = backward_on(grad, input, scale, std::nullopt, block_size, grid, wants_scale, false);
  return {dx, of_scale};
}

}  // namespace qtk
