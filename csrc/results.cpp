#include "results.h"

#include <ATen/ops/empty_like.h>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace qtk {
namespace {

constexpr size_t LARGE = size_t{4} << 20;  // bytes; below, the call costs more than the faults it saves

// Whole pages inside of [begin, begin + size). A kernel that knows no huge pages says no, and nothing is lost.
[[maybe_unused]] void prefer_huge_pages([[maybe_unused]] void* begin, [[maybe_unused]] size_t size) {
#ifdef MADV_HUGEPAGE
  static const uintptr_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t from = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t first = (from + page - 1) / page * page, last = (from + size) / page * page;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

at::Tensor empty_result(const at::Tensor& x) {
  at::Tensor result = at::empty_like(x);
  const size_t size = result.numel() * result.element_size();
  if (size >= LARGE) {
    prefer_huge_pages(result.mutable_data_ptr(), size);
  }
  return result;
}

}  // namespace qtk
