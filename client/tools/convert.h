// Convert: a quantised model from one format to another, no bit of any element changed. Verify: a
// check of that.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/tools/encode/target.h"
#include "client/tools/model.h"
#include "client/tools/rewrite.h"

namespace awqd::tools {

// Counts of the things that were compared and found to be alike.
struct Verification {
  int64_t linears = 0;
  int64_t elements = 0;  // of all linears, each with the same FP32 bits, or rounded from them
  // Elements that the type of dense weights cannot hold. They were rounded once.
  int64_t rounded = 0;
  int64_t biases = 0;  // elements
  int64_t tensors = 0, tensor_bytes = 0;
  int64_t files = 0, file_bytes = 0;
};

// Reads both from disk. `dense`: so many of the linears were written as tensors "<path>.weight".
// INTERNAL naming the first thing that differs.
absl::StatusOr<Verification> Verify(const Model& source, const std::string& written, int64_t dense,
                                    const Carried& carried, const Progress& progress);

// Compares files that were copied.
absl::Status CompareFiles(const Folder& source, const Folder& written, const Carried& carried,
                          Verification* out);

nlohmann::ordered_json ToJson(const Verification& verification);

// "F16", "BF16" or "F32" as config.json says, else F16.
absl::StatusOr<std::string> DenseTypeOf(const Model& source);
// "float16" for F16; empty for what is none of the three.
std::string ConfigTypeName(absl::string_view dtype);

struct ConvertOptions {
  std::string folder;
  std::string output;
  const Target* target = nullptr;
  // The type of dense weights, "F16", "BF16", "F32", and of those that "mlx" and "gguf" do not hold,
  // for "gguf" "Q8_0" and "Q4_0" too. Empty: as config.json says, else F16.
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
  bool dense = false;      // it became a weight of Conversion::dtype
  std::string type;        // of GGUF
};

struct Conversion : Rewritten {
  std::string from, to;  // formats
  std::string dtype;     // as the options have it; empty where none was dense
  std::vector<ConvertedLinear> linears;
  int64_t activations = 0;  // linears that declare quantised activations, which is not written
  std::optional<Verification> verified;
};

// INVALID_ARGUMENT naming the linear, or the option, that the target cannot hold; INTERNAL where
// what was written is not what was read. Nothing of `output` is left after an error.
absl::StatusOr<Conversion> Convert(const ConvertOptions& options, const Progress& progress);

nlohmann::ordered_json ToJson(const Conversion& conversion);

}  // namespace awqd::tools
