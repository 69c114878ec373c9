// Inspect: what is in a model's folder, linear by linear, and whether a server would load it.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/tools/model.h"

namespace awqd::tools {

struct InspectedLinear {
  std::string path;
  std::string scheme;  // "w4g128z"; empty where it does not load
  int64_t k = 0, n = 0;
  int64_t bytes = 0;  // of all its tensors in the files
  bool order = false, factor = false, bias = false;
  int64_t hadamard = 0;    // block of its transform of activations; 0: none
  std::string slice_of;    // of an expert in a tensor of all experts: the path of that
  bool codes_read = true;  // else it is too large: all but its codes was checked
  std::string error;       // why it does not load; empty where it does

  double bits_per_weight() const;  // 0 where it does not load
};

// A tensor of at least two dimensions that is part of no quantised linear.
struct InspectedTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
  std::string why;  // it is not quantised
};

struct Inspection {
  std::string path;
  std::string format;        // empty where there is none, or the checkpoint does not load
  std::string quant_method;  // likewise
  std::string note;          // what of the settings has no effect
  std::string error;         // why the folder does not load as a whole
  // The quantised linears that cannot be read, with the reason, as the account of the checkpoint's
  // tensors has them.
  model::UnservedLinears unserved;
  std::vector<InspectedLinear> linears;
  std::vector<InspectedTensor> not_quantised;
  int64_t other_tensors = 0;  // of fewer dimensions: norms, and biases of dense linears
  int64_t other_bytes = 0;
  int64_t total_bytes = 0;  // of every tensor

  bool loads() const;  // all that is quantised
};

// Decodes linears of up to 64 MiB, one at a time; of larger ones what is beside their codes, and
// the rows of a GGUF file some at a time. An error only where the folder cannot be read; what it
// holds is told in the result.
absl::StatusOr<Inspection> Inspect(const std::string& path, const Progress& progress);

nlohmann::ordered_json ToJson(const Inspection& inspection);

}  // namespace awqd::tools
