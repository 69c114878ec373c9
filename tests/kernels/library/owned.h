// Owners of the objects of awqd.h, and workspaces of a CPU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/library/awqd.h"

namespace awqd::testing {

template <typename T, void (*kEnd)(T*)>
struct Ends {
  void operator()(T* object) const { kEnd(object); }
};
using DevicePtr = std::unique_ptr<awqd_device, Ends<awqd_device, awqd_device_close>>;
using CheckpointPtr =
    std::unique_ptr<awqd_checkpoint, Ends<awqd_checkpoint, awqd_checkpoint_close>>;
using WeightPtr = std::unique_ptr<awqd_weight, Ends<awqd_weight, awqd_weight_free>>;
using StackPtr = std::unique_ptr<awqd_stack, Ends<awqd_stack, awqd_stack_free>>;

// Memory of a CPU for a workspace.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : bytes_(bytes), memory_(bytes + 256) {}
  awqd_workspace get() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return {memory_.data() + (256 - address % 256) % 256, bytes_};
  }

 private:
  int64_t bytes_;
  std::vector<char> memory_;
};

}  // namespace awqd::testing
