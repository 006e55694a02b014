// Calls of qtk::fake_quantize on NVIDIA's GPUs that are like one before: the kernel that Triton compiled for that one is
// launched by the driver, without Python. What was never called, or is not aligned, goes to qtk::fake_quantize_by_triton.

#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <bit>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "fake_quantize.h"

namespace qtk {
namespace {

constexpr size_t MOST_KEPT = 4096;
constexpr uintptr_t ALIGNMENT = 16;  // bytes, of what kernels were compiled for

// The functions of CUDA's driver that are used; a machine without it has none.
struct Driver {
  using Launch = int (*)(
      void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared, void* stream,
      void** parameters, void** extra);
  using Context = int (*)(void** context);
  using ParameterInfo = int (*)(void* function, size_t index, size_t* offset, size_t* size);

  Launch launch = nullptr;
  Context context = nullptr;
  ParameterInfo parameter_info = nullptr;

  Driver() {
    if (void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL)) {
      launch = reinterpret_cast<Launch>(dlsym(library, "cuLaunchKernel"));
      context = reinterpret_cast<Context>(dlsym(library, "cuCtxGetCurrent"));
      parameter_info = reinterpret_cast<ParameterInfo>(dlsym(library, "cuFuncGetParamInfo"));
    }
  }

  bool is_there() const { return launch && context && parameter_info; }

  bool has_context() const {
    void* current = nullptr;
    return context(&current) == 0 && current != nullptr;
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

// What a parameter of a kernel is; the numbers are those of qtk/kernels/gpu/native_launch.py.
enum Role : int64_t { INPUT, RESULT, SCALE, ZERO_POINT, INT32, INT64, FLOAT32, NOTHING };

size_t bytes_of(int64_t role) { return role == INT32 || role == FLOAT32 ? 4 : 8; }

struct Launch {
  void* function;
  unsigned grid[3], threads, shared;
  std::vector<int64_t> roles;
  std::vector<uint64_t> values;  // of numbers their bits
};

using Key = std::vector<int64_t>;

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0x9e3779b97f4a7c15;
    for (int64_t each : key) {
      hash = (hash ^ static_cast<uint64_t>(each)) * 0xff51afd7ed558ccd;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

std::shared_mutex mutex;
std::unordered_map<Key, Launch, Hash> launches;

void add(Key& key, const Tensor& tensor) {
  key.push_back(static_cast<int64_t>(tensor.scalar_type()) | tensor.dim() << 8);
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  key.insert(key.end(), sizes.begin(), sizes.end());
  key.insert(key.end(), strides.begin(), strides.end());
}

// All that a launch depends on but addresses.
void fill(
    Key& key, const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point, at::IntArrayRef block_size,
    int64_t qmin, int64_t qmax) {
  key.clear();
  key.insert(key.end(), {input.get_device(), scale.get_device(), qmin, qmax, zero_point.has_value(),
                         static_cast<int64_t>(block_size.size())});
  key.insert(key.end(), block_size.begin(), block_size.end());
  add(key, input);
  add(key, scale);
  if (zero_point) {
    key.push_back(zero_point->get_device());
    add(key, *zero_point);
  }
}

bool matches(const Launch& launch) {
  size_t offset = 0, size = 0, expected = 0;
  for (size_t index = 0; index < launch.roles.size(); ++index) {
    const size_t bytes = bytes_of(launch.roles[index]);
    expected = (expected + bytes - 1) / bytes * bytes;
    if (driver().parameter_info(launch.function, index, &offset, &size) != 0 || size != bytes || offset != expected) {
      return false;
    }
    expected += bytes;
  }
  return driver().parameter_info(launch.function, launch.roles.size(), &offset, &size) != 0;  // there are no more
}

// Keeps the launch of a call. Returns: whether; not without a driver that confirms the kernel's parameters.
bool keep_launch(
    const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point, at::IntArrayRef block_size, int64_t qmin,
    int64_t qmax, int64_t function, at::IntArrayRef grid, int64_t threads, int64_t shared, at::IntArrayRef roles,
    at::IntArrayRef values) {
  TORCH_CHECK_VALUE(grid.size() == 3 && roles.size() == values.size(), "keep_launch: three sizes, a value a parameter");
  Launch launch{reinterpret_cast<void*>(function),
                {static_cast<unsigned>(grid[0]), static_cast<unsigned>(grid[1]), static_cast<unsigned>(grid[2])},
                static_cast<unsigned>(threads), static_cast<unsigned>(shared), roles.vec(),
                {values.begin(), values.end()}};
  if (!driver().is_there() || !driver().has_context() || !matches(launch)) {
    return false;
  }
  Key key;
  fill(key, input, scale, zero_point, block_size, qmin, qmax);
  std::unique_lock lock(mutex);
  if (launches.size() >= MOST_KEPT) {
    launches.clear();
  }
  launches[key] = std::move(launch);
  return true;
}

bool is_aligned(const Tensor& a, const Tensor& b, const Tensor& c, const OptionalTensor& d) {
  auto at = [](const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()); };
  return (at(a) | at(b) | at(c) | (d ? at(*d) : 0)) % ALIGNMENT == 0;
}

// Launches what a call like this one launched before. Returns: the result; undefined if there was none.
Tensor launched(
    const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point, at::IntArrayRef block_size, int64_t qmin,
    int64_t qmax) {
  thread_local Key key;
  fill(key, input, scale, zero_point, block_size, qmin, qmax);
  std::shared_lock lock(mutex);
  const auto found = launches.find(key);
  if (found == launches.end()) {
    return {};
  }
  const Launch& launch = found->second;
  const c10::DeviceGuard guard(input.device());
  if (!driver().has_context()) {  // a new thread
    return {};
  }
  Tensor result = at::empty_like(input);
  if (!is_aligned(input, result, scale, zero_point)) {
    return {};
  }
  uint64_t values[64];
  void* parameters[64];
  const void* pointers[] = {
      input.const_data_ptr(), result.data_ptr(), scale.const_data_ptr(),
      zero_point ? zero_point->const_data_ptr() : nullptr};
  TORCH_INTERNAL_ASSERT(launch.roles.size() <= 64);
  for (size_t index = 0; index < launch.roles.size(); ++index) {
    const int64_t role = launch.roles[index];
    values[index] = role <= ZERO_POINT ? reinterpret_cast<uint64_t>(pointers[role]) : launch.values[index];
    parameters[index] = &values[index];
  }
  const c10::Stream stream = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(input.device());
  const int status = driver().launch(
      launch.function, launch.grid[0], launch.grid[1], launch.grid[2], launch.threads, 1, 1, launch.shared,
      stream.native_handle(), parameters, nullptr);
  TORCH_CHECK(status == 0, "qtk::fake_quantize: CUDA's driver did not launch a kernel, error ", status);
  return result;
}

Tensor fake_quantize_cuda(
    const Tensor& input, const Tensor& scale, const OptionalTensor& zero_point, at::IntArrayRef block_size, int64_t qmin,
    int64_t qmax) {
  Tensor result = launched(input, scale, zero_point, block_size, qmin, qmax);
  if (result.defined()) {
    return result;
  }
  static const auto by_triton = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("qtk::fake_quantize_by_triton", "")
                                    .typed<decltype(fake_quantize_cpu)>();
  return by_triton.call(input, scale, zero_point, block_size, qmin, qmax);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qtk, library) {
  library.def(
      "keep_launch(Tensor input, Tensor scale, Tensor? zero_point, int[] block_size, int qmin, int qmax, int function, "
      "int[] grid, int threads, int shared, int[] roles, int[] values) -> bool",
      keep_launch);
}

TORCH_LIBRARY_IMPL(qtk, CUDA, library) { library.impl("fake_quantize", fake_quantize_cuda); }

}  // namespace qtk
