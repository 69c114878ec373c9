// Convert: a quantised model from one format to another, no bit of any element changed.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/tools/encode/target.h"
#include "client/tools/rewrite.h"
#include "client/tools/verify.h"

namespace awqd::tools {

struct ConvertOptions {
  std::string folder;
  std::string output;
  const Target* target = nullptr;
  // Of dense weights: "F16", "BF16", "F32"; empty: what config.json says, else F16.
  std::string dtype;
  bool verify = false;
  Guard guard;
};

struct ConvertedLinear {
  std::string path;
  std::string scheme;  // as it was
  int64_t k = 0, n = 0;
  int64_t bytes_before = 0, bytes_after = 0;
  bool slice = false;      // it was part of a tensor of all experts
  bool zero_at_0 = false;  // gptq: AutoGPTQ reads that otherwise
};

struct Conversion {
  std::string from, to;  // formats
  std::string dtype;     // of dense weights; else empty
  std::vector<ConvertedLinear> linears;
  int64_t activations = 0;  // linears that declare quantised activations, which is not written
  Carried carried;
  int64_t bytes_before = 0, bytes_after = 0;  // of all tensors
  std::optional<Verification> verified;
};

// INVALID_ARGUMENT naming the linear, or the option, that the target cannot hold; INTERNAL where
// what was written is not what was read. Nothing of `output` is left after an error.
absl::StatusOr<Conversion> Convert(const ConvertOptions& options, const Progress& progress);

nlohmann::ordered_json ToJson(const Conversion& conversion);

}  // namespace awqd::tools
