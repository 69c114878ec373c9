// Verify: that a folder that was written holds what the one it was made of holds.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "client/tools/model.h"
#include "client/tools/rewrite.h"

namespace awqd::tools {

// What was compared and found to be alike.
struct Verification {
  int64_t linears = 0;
  int64_t elements = 0;  // of all linears, each with the same FP32 bits, or rounded from them
  // Of dense weights: elements that their type cannot hold, which are the one rounding of them.
  int64_t rounded = 0;
  int64_t biases = 0;  // elements
  int64_t tensors = 0, tensor_bytes = 0;
  int64_t files = 0, file_bytes = 0;
};

// Reads both from disk. `dense`: linears were written as tensors "<path>.weight". INTERNAL naming
// the first thing that differs.
absl::StatusOr<Verification> Verify(const Model& source, const std::string& written, bool dense,
                                    const Carried& carried, const Progress& progress);

nlohmann::ordered_json ToJson(const Verification& verification);

}  // namespace awqd::tools
