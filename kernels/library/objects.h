// The objects behind the pointers of awqd.h, and the border between its codes and absl::Status.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/checkpoint/model_folder.h"
#include "kernels/device.h"
#include "kernels/library/awqd.h"
#include "kernels/weight.h"

struct awqd_device {
  std::shared_ptr<awqd::Device> device;
};

struct awqd_checkpoint {
  awqd::model::ModelFolder folder;
  awqd::model::Checkpoint checkpoint;
};

struct awqd_weight {
  std::shared_ptr<awqd::Device> device;  // outlives the weight's memory
  std::shared_ptr<const awqd::DeviceWeight> weight;
  std::string scheme;
};

struct awqd_stack {
  std::shared_ptr<awqd::Device> device;
  std::vector<std::shared_ptr<const awqd::DeviceWeight>> experts;  // of one [K, N]
  awqd::Buffer parts;                                              // ExpertParts of each, on a GPU
  bool alike = true;      // one kernel can multiply by all (IsGroupable)
  bool has_bias = false;  // some have one

  const awqd::WeightShape& shape() const { return experts[0]->shape; }
};

namespace awqd::library {

// Keeps the error, if it is one, for awqd_error_message, and returns its code.
int Report(const absl::Status& status) noexcept;

// Runs `body`, which returns absl::Status; no exception leaves it.
template <typename F>
int Call(F&& body) noexcept {
  try {
    return Report(std::forward<F>(body)());
  } catch (const std::bad_alloc&) {
    return Report(OutOfMemory("the process has no memory for this call"));
  } catch (...) {
    return Report(absl::Status(absl::StatusCode::kInternal, ""));
  }
}

// INVALID_ARGUMENT for a null pointer.
inline absl::Status CheckPointer(absl::string_view name, const void* pointer) {
  return pointer == nullptr ? BadValue(name, "NULL", "an address") : absl::OkStatus();
}

// INVALID_ARGUMENT where a structure of the caller is none of this version.
template <typename Structure>
absl::Status CheckStructure(absl::string_view name, const Structure* structure) {
  AWQD_RETURN_IF_ERROR(CheckPointer(name, structure));
  if (structure->size == sizeof(Structure)) return absl::OkStatus();
  return BadValue(absl::StrCat(name, "->size"), structure->size,
                  absl::StrCat(sizeof(Structure), ", that of version ", AWQD_ABI_VERSION));
}

}  // namespace awqd::library
