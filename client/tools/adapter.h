// Adapter: a LoRA or DoRA that peft saved, adapter_config.json and adapter_model.safetensors.
#pragma once

#include <re2/re2.h>

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/tools/elements.h"
#include "client/tools/gguf_metadata.h"
#include "client/tools/model.h"

namespace awqd::tools {

// The change of a weight [N, K] by an adapter:
//
//   W'[n, k] = W[n, k] + scaling * sum over r of B[n, r] * A[r, k]
//   DoRA:  W'[n, k] = m[n] / |row n of that| * that
//
// in FP32, products and sums one at a time in the order of r; the norm of a row is summed in double
// and rounded to FP32.
struct LowRank {
  int64_t k = 0, n = 0, r = 0;
  float scaling = 1;
  std::vector<float> a;          // [r, K]
  std::vector<float> b;          // [N, r]
  std::vector<float> magnitude;  // [N], m; or empty

  // Brings its rows into the order of a GGUF file's, whose heads have two rows or more.
  void SortRows(const RowOrder& order);
  // Changes rows [begin, begin + rows) of W.
  void AddTo(int64_t begin, int64_t rows, float* w) const;
};

// Move-only.
class Adapter {
 public:
  // `path`: a directory. INVALID_ARGUMENT or UNIMPLEMENTED naming the setting or the tensor that
  // cannot be merged, and what was expected.
  static absl::StatusOr<Adapter> Open(const std::string& path);

  // The tensors of a module by its path in the base model.
  struct Module {
    // By their names: "lora_A", "lora_B", "lora_B.bias", "lora_embedding_A", "lora_embedding_B",
    // "lora_magnitude_vector".
    std::map<std::string, model::TensorLocation> tensors;
  };
  const std::map<std::string, Module>& modules() const { return modules_; }
  // Whole tensors that take the place of the base's, by the base's names: of modules_to_save, biases
  // and embeddings.
  const std::map<std::string, model::TensorLocation>& tensors() const { return saved_; }

  // Reads what it adds to a module whose weight is [rows, cols] in its file. INVALID_ARGUMENT where
  // a tensor has another shape.
  absl::StatusOr<LowRank> Read(const std::string& path, int64_t rows, int64_t cols) const;
  // scaling * lora_B.bias [N]; empty without one.
  absl::StatusOr<std::vector<float>> ReadBias(const std::string& path) const;

  absl::Status CheckUnchanged() const { return tensors_.CheckUnchanged(); }

 private:
  absl::Status ReadSettings(const nlohmann::ordered_json& config);
  absl::Status FindModules();
  // A number for the paths that a regular expression matches, the first that does, or for all.
  struct Numbers {
    std::vector<std::pair<std::unique_ptr<RE2>, double>> patterns;
    double otherwise = 0;

    double Of(const std::string& path) const;
  };
  absl::StatusOr<Numbers> ReadNumbers(const char* key, const char* patterns) const;
  absl::StatusOr<double> Scaling(const std::string& path, int64_t r) const;

  Folder folder_;
  Tensors tensors_;
  nlohmann::ordered_json config_;
  Numbers ranks_, alphas_;
  std::map<std::string, Module> modules_;
  std::map<std::string, model::TensorLocation> saved_;
};

// All of a small tensor of F16, BF16 or F32. INVALID_ARGUMENT for another type.
absl::StatusOr<std::vector<float>> ReadFloats(const std::string& name,
                                              const model::TensorLocation& place);

}  // namespace awqd::tools
