// The ops as torch sees them: schemas, the CPU backend, and autograd for every device.

#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <memory>
#include <vector>

#include "fake_quantize.h"
#include "fake_quantize_dynamic.h"

namespace qtk {
namespace {

constexpr const char* FORWARD = "qtk::fake_quantize";
constexpr const char* BACKWARD = "qtk::fake_quantize_backward";
constexpr const char* DYNAMIC = "qtk::fake_quantize_dynamic";

const auto& forward_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(FORWARD, "").typed<decltype(fake_quantize_cpu)>();
  return op;
}

const auto& backward_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(BACKWARD, "").typed<decltype(fake_quantize_backward_cpu)>();
  return op;
}

const auto& dynamic_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(DYNAMIC, "").typed<decltype(fake_quantize_dynamic_cpu)>();
  return op;
}

// State that both autograd nodes save for the backward pass.
struct Saved {
  torch::autograd::SavedVariable input, scale, zero_point;
  std::vector<int64_t> block_size;
  int64_t qmin, qmax;

  Saved(const Tensor& x, const Tensor& s, const OptionalTensor& z, at::IntArrayRef blocks, int64_t low, int64_t high)
      : input(x, false), scale(s, false), zero_point(z, false), block_size(blocks.vec()), qmin(low), qmax(high) {}

  Gradients backward(const Tensor& grad, bool wants_scale, bool wants_zero_point) const {
    const Tensor zero = zero_point.unpack();
    return backward_op().call(
        grad, input.unpack(), scale.unpack(), zero.defined() ? OptionalTensor(zero) : std::nullopt, block_size, qmin,
        qmax, wants_scale, wants_zero_point);
  }

  void release() {
    input.reset_data();
    scale.reset_data();
    zero_point.reset_data();
  }
};

struct FakeQuantizeBackward : torch::autograd::Node {
  explicit FakeQuantizeBackward(Saved kept) : saved(std::move(kept)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined()) {
      return {Tensor(), Tensor(), Tensor()};
    }
    const bool wants_scale = task_should_compute_output(1), wants_zero_point = task_should_compute_output(2);
    auto [dx, of_scale, of_zero] = saved.backward(grads[0], wants_scale, wants_zero_point);
    return {dx, wants_scale ? of_scale : Tensor(), wants_zero_point ? of_zero : Tensor()};
  }

  void release_variables() override { saved.release(); }

  Saved saved;
};

// The second derivative: dx is linear in the upstream gradient and constant in x and the range almost everywhere.
struct FakeQuantizeBackwardBackward : torch::autograd::Node {
  FakeQuantizeBackwardBackward(Saved kept, bool of_range) : saved(std::move(kept)), range_is_wanted(of_range) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_NOT_IMPLEMENTED(
        !range_is_wanted,
        "qtk::fake_quantize has no second derivative with respect to a learned range; call fix_range() first");
    return {grads[0].defined() ? std::get<0>(saved.backward(grads[0], false, false)) : Tensor()};
  }

  void release_variables() override { saved.release(); }

  Saved saved;
  bool range_is_wanted;
};

// A std::shared_ptr in older versions of torch, a c10::intrusive_ptr in newer ones.
using NodePointer = decltype(torch::autograd::Edge::function);

template <class Made, class... Arguments>
NodePointer node_for(torch::autograd::edge_list edges, Arguments&&... arguments) {
  NodePointer node = [&]() -> NodePointer {
    if constexpr (std::is_constructible_v<NodePointer, std::shared_ptr<Made>>) {
      return std::shared_ptr<Made>(new Made(std::forward<Arguments>(arguments)...));
    } else {
      return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
    }
  }();
  node->set_next_edges(std::move(edges));
  return node;
}

// Without this, forward mode would take the results for constants.
template <class... Tensors>
void refuse_forward_mode(const Tensors&... tensors) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !(torch::autograd::isFwGradDefined(tensors) || ...),
      "qtk::fake_quantize has no derivatives in forward mode (torch.func.jvp, jacfwd, hessian); use reverse mode: "
      "torch.func.vjp, jacrev, torch.autograd.functional.hessian");
}

Tensor fake_quantize_autograd(
    c10::DispatchKeySet keys, const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point,
    at::IntArrayRef block_size, int64_t qmin, int64_t qmax) {
  refuse_forward_mode(input, scale, zero_point);
  NodePointer node;
  if (torch::autograd::compute_requires_grad(input, scale, zero_point)) {
    node = node_for<FakeQuantizeBackward>(
        torch::autograd::collect_next_edges(input, scale, zero_point),
        Saved(input, scale, zero_point, block_size, qmin, qmax));
  }
  Tensor result = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return forward_op().redispatch(
        keys & c10::after_autograd_keyset, input, scale, zero_point, block_size, qmin, qmax);
  }();
  if (node) {
    torch::autograd::set_history(result, node);
  }
  return result;
}

Gradients fake_quantize_backward_autograd(
    c10::DispatchKeySet keys, const Tensor& grad, const Tensor& input, const Tensor& scale,
    const OptionalTensor& zero_point, at::IntArrayRef block_size, int64_t qmin, int64_t qmax, bool wants_scale,
    bool wants_zero_point) {
  refuse_forward_mode(grad, input, scale, zero_point);
  NodePointer node;
  if (torch::autograd::compute_requires_grad(grad)) {
    node = node_for<FakeQuantizeBackwardBackward>(
        torch::autograd::collect_next_edges(grad), Saved(input, scale, zero_point, block_size, qmin, qmax),
        torch::autograd::compute_requires_grad(scale, zero_point));
  }
  auto result = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return backward_op().redispatch(
        keys & c10::after_autograd_keyset, grad, input, scale, zero_point, block_size, qmin, qmax, wants_scale,
        wants_zero_point);
  }();
  if (node) {
    torch::autograd::set_history(std::get<0>(result), node);
  }
  return result;
}

// Straight-through estimator with the range as a constant.
Dynamic fake_quantize_dynamic_autograd(
    c10::DispatchKeySet keys, const Tensor& input, at::IntArrayRef block_size, int64_t qmin, int64_t qmax,
    bool symmetric) {
  refuse_forward_mode(input);
  Dynamic result = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return dynamic_op().redispatch(keys & c10::after_autograd_keyset, input, block_size, qmin, qmax, symmetric);
  }();
  if (torch::autograd::compute_requires_grad(input)) {
    const auto& [y, scale, zero_point] = result;
    torch::autograd::set_history(
        y, node_for<FakeQuantizeBackward>(
               torch::autograd::collect_next_edges(input, scale, zero_point),
               Saved(input, scale, symmetric ? std::nullopt : OptionalTensor(zero_point), block_size, qmin, qmax)));
  }
  return result;
}

}  // namespace

Tensor fake_quantize(
    const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point, at::IntArrayRef block_size,
    int64_t qmin, int64_t qmax) {
  return forward_op().call(input, scale, zero_point, block_size, qmin, qmax);
}

TORCH_LIBRARY_FRAGMENT(qtk, library) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  library.def(
      "fake_quantize(Tensor input, Tensor scale, Tensor? zero_point, int[] block_size, int qmin, int qmax) -> Tensor",
      tags);
  library.def(
      "fake_quantize_backward(Tensor grad, Tensor input, Tensor scale, Tensor? zero_point, int[] block_size, int qmin, "
      "int qmax, bool wants_scale, bool wants_zero_point) -> (Tensor, Tensor, Tensor)",
      tags);
  library.def(
      "fake_quantize_dynamic(Tensor input, int[] block_size, int qmin, int qmax, bool symmetric) -> (Tensor, Tensor, "
      "Tensor)",
      tags);
}

TORCH_LIBRARY_IMPL(qtk, CPU, library) {
  library.impl("fake_quantize", fake_quantize_cpu);
  library.impl("fake_quantize_backward", fake_quantize_backward_cpu);
  library.impl("fake_quantize_dynamic", fake_quantize_dynamic_cpu);
  library.impl("fake_quantize_with_residual", fake_quantize_with_residual_cpu);  // Python has the schemas of these,
  library.impl("fake_quantize_residual_backward", fake_quantize_residual_backward_cpu);  // and their autograd
  library.impl("fake_quantize_float", fake_quantize_float_cpu);
  library.impl("fake_quantize_float_backward", fake_quantize_float_backward_cpu);
}

TORCH_LIBRARY_IMPL(qtk, Autograd, library) {
  library.impl("fake_quantize", fake_quantize_autograd);
  library.impl("fake_quantize_backward", fake_quantize_backward_autograd);
  library.impl("fake_quantize_dynamic", fake_quantize_dynamic_autograd);
}

}  // namespace qtk
