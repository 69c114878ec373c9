// Target: a format that tools write linears in. The way back of kernels/formats, used by nothing
// that serves.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/weight.h"

namespace awqd::tools {

// A tensor to be written. Its bytes come in parts, so that none has to be in memory as a whole.
struct NewTensor {
  std::string name;  // of an encoded linear: its suffix, "qweight"
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
  // Parts begin and end at multiples of it, but for the last end. A divisor of `bytes` or larger.
  int64_t unit = 1;
  // Fills `out` with the bytes from `at` on.
  std::function<absl::Status(int64_t at, absl::Span<uint8_t> out)> read;
};

// Of bytes that are there.
NewTensor MadeTensor(std::string name, std::string dtype, std::vector<int64_t> shape,
                     std::vector<uint8_t> bytes);

// I32, of words that are there.
NewTensor MadeTensor(std::string name, std::vector<int64_t> shape, std::vector<uint32_t> words);

// What the settings of a folder say of a linear.
struct LinearFacts {
  int64_t k = 0, n = 0;
  int bits = 0;
  int64_t group_rows = 0;  // rows of K that share a scale; K itself for one group
  bool symmetric = false;  // every zero is 2^(bits-1)
  bool order = false;      // rows are sorted by group
  bool zero_at_0 = false;  // some zero is 0

  int64_t groups() const { return (k + group_rows - 1) / group_rows; }
};
LinearFacts FactsOf(const HostWeight& weight);

struct EncodedLinear {
  std::vector<NewTensor> tensors;
  LinearFacts facts;
};

struct EncodeOptions {
  std::string bias_dtype = "F16";  // holds the bias exactly
  std::string dtype;               // of the target "dense": "F16", "BF16", "F32"
};

// Everything that was encoded, for the settings.
struct FolderFacts {
  std::vector<std::pair<std::string, LinearFacts>> linears;  // by path
  std::vector<std::string> dense;  // paths of linears that stay as they are
  bool rtn = false;                // codes were made by rounding to nearest
  bool search = false;             // with a search for the range
};

struct Target {
  absl::string_view name;
  // The format whose decode is the inverse; null of "dense".
  absl::string_view format;
  // Bits that `quantize` may make for it, and whether zeros may be other than 2^(bits-1).
  absl::Span<const int> widths;
  bool asymmetric = true;
  // What K and N must be multiples of.
  int64_t k_multiple = 1, n_multiple = 1;

  // INVALID_ARGUMENT naming the part that the format cannot hold: what is encoded has, bit for bit,
  // the elements of the weight.
  absl::StatusOr<EncodedLinear> (*encode)(HostWeight weight, const EncodeOptions& options);
  // config.json's quantization_config; null of "dense". INVALID_ARGUMENT naming the linear where
  // the settings cannot say what differs between linears.
  absl::StatusOr<nlohmann::ordered_json> (*settings)(const FolderFacts& facts);
};

extern const Target kAwqTarget;                // awq.cc
extern const Target kGptqTarget;               // gptq.cc
extern const Target kCompressedTensorsTarget;  // compressed_tensors.cc
extern const Target kGemliteTarget;            // gemlite.cc
extern const Target kFasterTransformerTarget;  // fastertransformer.cc
extern const Target kDenseTarget;              // dense.cc

absl::Span<const Target* const> AllTargets();
// Null when there is none of that name.
const Target* TargetNamed(absl::string_view name);

}  // namespace awqd::tools
