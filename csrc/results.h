// Memory for the results of ops.
#pragma once

#include <ATen/core/Tensor.h>

namespace qtk {

// A tensor as torch allocates the result of an op on x, yet unwritten. A large one is asked to lie in huge pages, as in
// NumPy: what is fresh from the system then faults once in 2 MiB and not once in 4 KiB.
at::Tensor empty_result(const at::Tensor& x);

}  // namespace qtk
