// Quantize: a dense model to a quantised one by rounding to nearest (Rtn).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/tools/diff.h"
#include "client/tools/encode/target.h"
#include "client/tools/rewrite.h"
#include "kernels/weight.h"

namespace awqd::tools {

inline constexpr int64_t kGroupSizeOfTarget = -2;  // Target::group_size

struct RtnOptions {
  int bits = 4;              // 2 to 8
  int64_t group_size = 128;  // -1: all of K; a divisor of K; or the constant above
  bool symmetric = false;
  bool search = false;  // for the range of a group that gives the least squared error
  bool real_zeros = false;
};

// The scale and the zero of a group, and the codes of its `values`.
//
//   symmetric    s = max(max / (2^(b-1) - 1), -min / 2^(b-1)), z = 2^(b-1)
//   asymmetric   s = (max - min) / (2^b - 1) with 0 in the range, z = round(-min / s)
//   q = round(w / s) + z, within 0 and 2^b - 1
//   real_zeros   s as asymmetric, without 0 in the range, m = min rounded to the type of scales,
//                q = round((w - m) / s), and W = q * s + m
//
// s is rounded to the type of scales first, and what else is computed uses the rounded one. A
// search multiplies the range by 1, 0.98, ..., 0.5 and keeps the first of the least squared errors.
// A group of zeros gets the scale 1. False where s is past the range of the type.
struct RtnGroup {
  float scale = 1;
  int zero = 0;
  float bias = 0;  // m
};
bool QuantizeGroup(absl::Span<const float> values, const RtnOptions& options, DType scale_dtype,
                   RtnGroup* group, uint8_t* codes);

// A weight [N, K] of which `read` fills rows of K: in-features of an out-feature.
using ReadDenseRows = absl::FunctionRef<absl::Status(int64_t begin, int64_t end, float* to)>;

// Scales of FP16 or BF16. INVALID_ARGUMENT naming the element that is no number or past the range.
absl::StatusOr<HostWeight> Rtn(int64_t k, int64_t n, const RtnOptions& options, DType scale_dtype,
                               ReadDenseRows read);

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

// Why a linear of that path is left out, by its name; empty where it is not.
std::string WhyLeftDense(absl::string_view path, absl::Span<const std::string> leave_out);

struct QuantizedLinear;

// Rounds a weight [N, K] to the target's form, and adds it to `told`, errors and all.
absl::StatusOr<EncodedLinear> QuantizeRows(const std::string& path, int64_t k, int64_t n,
                                           DType scale_dtype, const QuantizeOptions& options,
                                           ReadDenseRows read, std::vector<QuantizedLinear>* told);

// Why a linear [N, K] is not quantised; empty where it is.
std::string WhyDense(const QuantizeOptions& options, const std::string& path, int64_t k, int64_t n);

// With the target's own defaults where options leave them to it.
QuantizeOptions WithDefaults(QuantizeOptions options);

struct QuantizedLinear {
  std::string path;
  std::string scheme;
  int64_t k = 0, n = 0;
  SquaredNorms norms;  // errors, as diff has them
  double largest = 0;
  bool zero_at_0 = false;  // gptq: AutoGPTQ reads that otherwise
};
struct DenseLinear {
  std::string path;
  std::string why;  // it stays as it is
};

struct Quantization : Rewritten {
  std::vector<QuantizedLinear> linears;
  std::vector<DenseLinear> dense;
};

// INVALID_ARGUMENT for options that no model can be quantised with.
absl::Status Validate(const QuantizeOptions& options);

// Quantises every tensor "<path>.weight" of two dimensions and of F16, BF16 or F32 that is not left
// out. INVALID_ARGUMENT for options that the target cannot hold, a model that is quantised, weights
// that are no numbers. Nothing of `output` is left after an error.
absl::StatusOr<Quantization> Quantize(const QuantizeOptions& options, const Progress& progress);

nlohmann::ordered_json ToJson(const std::vector<QuantizedLinear>& linears);
nlohmann::ordered_json ToJson(const Quantization& quantization);

}  // namespace awqd::tools
