// The metadata of a GGUF file and config.json, each made of the other; what llama.cpp calls tensors.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/file.h"

namespace awqd::tools {

struct ModelConfig {
  // The metadata of a GGUF file under the names of config.json: the architecture as "model_type",
  // the sizes of the model, special tokens. Under "gguf" every key of the file as it stands there,
  // but those of `left_out`.
  nlohmann::ordered_json json;
  // Long arrays, such as the tokenizer's, and why they are not copied.
  std::vector<std::string> left_out = {};
  // Whether it has numbers that only Python's JSON has. They are strings here.
  bool python = false;
};
// INVALID_ARGUMENT naming the file and the key.
absl::StatusOr<ModelConfig> ReadGgufConfig(const model::File& file);

// The order of the rows of a tensor in a GGUF file, as those of the model's tensor.
struct RowOrder {
  // Above 0: rows of each of so many heads are those of its two halves in turn, as llama.cpp turns
  // neighbours by an angle where transformers turns the halves.
  int64_t heads = 0;
  int64_t step = 1, first = 0;  // every `step`th row from `first` on

  bool same() const { return heads == 0 && step == 1; }
  // The row of the model's tensor that is row `row` of `rows`.
  int64_t Source(int64_t row, int64_t rows) const;
  // Rows of which as many of the model's tensor are the sources, in multiples of it.
  int64_t Unit(int64_t rows) const { return heads > 0 ? rows / heads : 1; }
};

// A tensor of a GGUF file, or the slice of one.
struct GgufPlace {
  std::string path;     // "blk.0.attn_q": the tensor's name, but for ".weight" or ".bias"
  int64_t expert = -1;  // of the first dimension; -1: it is the whole
  RowOrder rows;
};

// The architectures whose tensors llama.cpp has names for: of models of type llama, mistral,
// mixtral, qwen2, qwen3, qwen3_moe and gpt_oss. Another model's tensors keep their names, and its
// metadata are what config.json says under usual names.
//
// Facts: PyPI gguf, constants.py and tensor_mapping.py; llama.cpp, its conversion of these models.
class GgufNames {
 public:
  // `config` may be one that ReadGgufConfig made. INVALID_ARGUMENT naming what config.json lacks, or
  // rotary embeddings that are not written.
  static absl::StatusOr<GgufNames> FromConfig(const nlohmann::ordered_json& config);

  // Whether llama.cpp loads a model of such tensors.
  bool known() const { return known_; }
  // Where the rows of a module's tensor go, of the path of a linear or a tensor's name without its
  // last part. Two places for gate and up that are one. Empty where llama.cpp has no name for it.
  std::vector<GgufPlace> Find(absl::string_view path) const;

  // The keys and values of the file, and how many.
  const std::string& metadata() const { return metadata_; }
  int64_t keys() const { return keys_; }
  // Factors of the frequencies of rotary embeddings, for a tensor "rope_freqs.weight"; or empty.
  const std::vector<float>& rope_factors() const { return rope_factors_; }

 private:
  absl::Status AddModel(const nlohmann::ordered_json& config);
  absl::Status AddRotary(const nlohmann::ordered_json& config, int64_t head_dim);
  void AddKey(absl::string_view key, uint32_t type);
  void AddInteger(absl::string_view key, int64_t value);
  void AddFloat(absl::string_view key, double value);
  void AddText(absl::string_view key, absl::string_view value);

  bool known_ = false;
  bool rotate_ = false;  // see RowOrder::heads
  std::string architecture_;
  int64_t heads_ = 0, kv_heads_ = 0;
  std::string metadata_;
  int64_t keys_ = 0;
  std::vector<float> rope_factors_;
};

}  // namespace awqd::tools
