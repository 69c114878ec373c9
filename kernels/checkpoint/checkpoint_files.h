// Which files of a checkpoint's directory hold its settings and its tensors, and what its JSON
// files say about quantisation, as a Setting that formats read.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/file.h"
#include "kernels/checkpoint/shard_index.h"
#include "kernels/formats/format.h"

namespace awqd::model {

constexpr absl::string_view kConfigFile = "config.json";

// config.json: the object under "quantization_config"; nothing when the key is absent or null.
// INVALID_ARGUMENT for what is no JSON, no object, or too large.
absl::StatusOr<std::optional<Setting>> ParseConfigJson(absl::string_view text);

// quant_config.json or quantize_config.json, whose top level has the keys. `default_method` is
// assumed when the file names no quant_method.
absl::StatusOr<Setting> ParseQuantConfigJson(absl::string_view text,
                                             absl::string_view default_method);

// A checkpoint's settings of quantisation, and the file and key that they stand under.
struct QuantSettings {
  Setting settings;
  std::string place;  // "my-model/config.json: quantization_config"
};

// config.json's quantization_config, else quant_config.json, else quantize_config.json. NOT_FOUND
// when the directory or its config.json is missing, INVALID_ARGUMENT naming file and key otherwise.
absl::StatusOr<QuantSettings> ReadQuantSettings(const FileSource& root, absl::string_view model);

struct TensorFiles {
  std::vector<std::string> names;  // sorted, in the model's directory
  std::vector<std::shared_ptr<const TensorFile>> files;
  std::optional<ShardIndex> index;  // where there is one
};

// Opens the files that the index names, else every *.safetensors of the directory. Their headers
// together are within the limits of one. INVALID_ARGUMENT for a bad index or file, one file under
// two names, or when there is nothing to read; UNAVAILABLE once `cancelled`.
absl::StatusOr<TensorFiles> OpenTensorFiles(const FileSource& root, absl::string_view model,
                                            const std::atomic<bool>* cancelled = nullptr);

// The path beneath the root of the GGUF file that the repository's entry `model` is ("a.gguf") or
// holds: a directory with one *.gguf and no config.json. Empty for every other entry, also for one
// that does not exist. INVALID_ARGUMENT for a directory with several *.gguf and no config.json.
absl::StatusOr<std::string> FindGguf(const FileSource& root, absl::string_view model);

// OK where the repository's entry is a model: a directory with a config.json, or what FindGguf
// finds. NOT_FOUND where it is none; another error where it is one that cannot be opened.
absl::Status FindModel(const FileSource& root, absl::string_view model);

}  // namespace awqd::model
