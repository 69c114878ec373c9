// Which files of a checkpoint's directory hold its settings and its tensors.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/formats/format.h"
#include "server/model/repository_root.h"

namespace awqd::model {

constexpr absl::string_view kConfigFile = "config.json";
constexpr absl::string_view kIndexFile = "model.safetensors.index.json";

// config.json's quantization_config, else quant_config.json, else quantize_config.json. NOT_FOUND
// when the directory or its config.json is missing, INVALID_ARGUMENT naming file and key otherwise.
absl::StatusOr<QuantConfig> ReadQuantConfig(const RepositoryRoot& root, absl::string_view model);

struct TensorFiles {
  std::vector<std::string> names;                 // sorted, in the model's directory
  std::map<std::string, std::string> weight_map;  // tensor -> file; empty without an index
};

// The files that the index names, else every *.safetensors of the directory. INVALID_ARGUMENT for
// a bad index or when there is nothing to read.
absl::StatusOr<TensorFiles> FindTensorFiles(const RepositoryRoot& root, absl::string_view model);

}  // namespace awqd::model
