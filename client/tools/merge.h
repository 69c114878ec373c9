// Merge: an adapter added to the weights of its base model, which become dense or are quantised.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/tools/quantize.h"
#include "client/tools/rewrite.h"

namespace awqd::tools {

struct MergeOptions {
  // The base model, OUT, the target and how to quantise. `quantize.target` is "dense" or a
  // quantised one: then every linear that quantize would quantise is.
  QuantizeOptions quantize;
  std::string adapter;  // a directory
  // As ConvertOptions has it, for the weights that stay dense; empty: of a dense base each weight's
  // own.
  std::string dtype;
};

struct Merged : Rewritten {
  std::string to;
  int64_t modules = 0;   // that the adapter adds to
  int64_t replaced = 0;  // tensors that it brings as a whole
  // Linears that were merged, or rounded, with what that lost of the FP32 result; `scheme` is the
  // type of a dense one.
  std::vector<QuantizedLinear> linears;
};

// INVALID_ARGUMENT for options that no model can be merged with.
absl::Status Validate(const MergeOptions& options);

// INVALID_ARGUMENT naming the module or the tensor that the base has not, or of another shape.
// Nothing of the output is left after an error. Of a quantised base one linear is in memory, of a
// dense one some rows.
absl::StatusOr<Merged> Merge(const MergeOptions& options, const Progress& progress);

nlohmann::ordered_json ToJson(const Merged& merged);

}  // namespace awqd::tools
