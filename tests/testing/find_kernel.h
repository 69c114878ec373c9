// The registry by name.
#pragma once

#include "absl/strings/string_view.h"
#include "kernels/registry.h"

namespace awqd::testing {

// The row with that name, or null.
inline const KernelRow* FindKernel(absl::string_view name) {
  for (const KernelRow* row : AllKernels()) {
    if (row->name == name) return row;
  }
  return nullptr;
}

}  // namespace awqd::testing
