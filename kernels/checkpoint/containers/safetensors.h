// Reader of the safetensors container: u64 little-endian header length, JSON header, raw tensors.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/file.h"

namespace awqd::model {

// Limits on the sizes that a file claims, or all files of a model together, checked before anything
// is allocated for them.
struct SafetensorsLimits {
  int64_t max_header_bytes = 100'000'000;
  int64_t max_tensors = 1'000'000;
  size_t max_name_bytes = 1024;
  size_t max_rank = 8;
  // UNAVAILABLE once it is true; null: never.
  const std::atomic<bool>* cancelled = nullptr;
};

// Parses the JSON header of a file with `data_bytes` bytes after it. INVALID_ARGUMENT naming the
// tensor and the rule that it breaks; README.md lists the rules. `metadata`, which may be null,
// becomes the texts under "__metadata__".
absl::StatusOr<TensorMap> ParseSafetensorsHeader(absl::string_view header, int64_t data_bytes,
                                                 const SafetensorsLimits& limits = {},
                                                 Metadata* metadata = nullptr);

// Reads and checks the header. Errors are prefixed with the file's name.
absl::StatusOr<TensorFile> OpenSafetensors(File file, const SafetensorsLimits& limits = {});

}  // namespace awqd::model
