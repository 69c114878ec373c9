// The config.json that a GGUF file's metadata make.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/checkpoint/file.h"

namespace awqd::tools {

struct GgufConfig {
  // Under the names that config.json has for them: the architecture as "model_type", the sizes of
  // the model, special tokens. Under "gguf" every key of the file as it stands there, but those of
  // `left_out`.
  nlohmann::ordered_json config;
  // Long arrays, such as the tokenizer's, and why they are not copied.
  std::vector<std::string> left_out;
};

// `file` is one that checkpoint/gguf.h opens. INVALID_ARGUMENT naming file and key.
absl::StatusOr<GgufConfig> ReadGgufConfig(const model::File& file);

}  // namespace awqd::tools
