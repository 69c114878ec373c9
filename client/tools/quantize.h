// Quantize: a dense model to a quantised one by rounding to nearest.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/tools/encode/target.h"
#include "client/tools/rewrite.h"
#include "client/tools/rtn.h"

namespace awqd::tools {

struct QuantizeOptions {
  std::string folder;
  std::string output;
  const Target* target = nullptr;
  RtnOptions rtn;
  // Linears whose path has one of these in it stay dense, beside those of kLeftOut.
  std::vector<std::string> leave_out;
  Guard guard;
};

// Parts of paths of linears that lose most: embeddings, heads, routers.
inline constexpr absl::string_view kLeftOut[] = {"embed",  "lm_head",    "wte",   "wpe",
                                                 "pooler", "classifier", "score", "router"};

struct QuantizedLinear {
  std::string path;
  std::string scheme;
  int64_t k = 0, n = 0;
  double relative = 0, largest = 0;  // errors, as diff has them
  bool zero_at_0 = false;            // gptq: AutoGPTQ reads that otherwise
};
struct DenseLinear {
  std::string path;
  std::string why;  // it stays as it is
};

struct Quantization {
  std::vector<QuantizedLinear> linears;
  std::vector<DenseLinear> dense;
  Carried carried;
  int64_t bytes_before = 0, bytes_after = 0;  // of all tensors
};

// Quantises every tensor "<path>.weight" of two dimensions and of F16, BF16 or F32 that is not left
// out. INVALID_ARGUMENT for options that the target cannot hold, a model that is quantised, weights
// that are no numbers. Nothing of `output` is left after an error.
absl::StatusOr<Quantization> Quantize(const QuantizeOptions& options, const Progress& progress);

nlohmann::ordered_json ToJson(const Quantization& quantization);

}  // namespace awqd::tools
