// Target: a format that tools write linears in, the inverse of kernels/formats. Only tools use it.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
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
  // Fills `out` with the bytes from `at` on. Thread-safe.
  std::function<absl::Status(int64_t at, absl::Span<uint8_t> out)> read;
};

// A tensor of bytes that are in memory.
NewTensor MadeTensor(std::string name, std::string dtype, std::vector<int64_t> shape,
                     std::vector<uint8_t> bytes);

// The same, I32, of words.
NewTensor MadeTensor(std::string name, std::vector<int64_t> shape, std::vector<uint32_t> words);

// Numbers, each rounded once to a type of FloatTypeNamed.
NewTensor RoundedTensor(std::string name, const std::string& dtype, std::vector<int64_t> shape,
                        absl::Span<const float> values);

// The tensor "weight" [N, K] of such a type, whose rows `store` writes. Thread-safe if that is.
using StoreRows = std::function<absl::Status(int64_t begin, int64_t end, uint8_t* to)>;
NewTensor DenseTensor(const std::string& dtype, int64_t n, int64_t k, StoreRows store);

// The facts of a linear that the settings of a folder state.
struct LinearFacts {
  int64_t k = 0, n = 0;
  int bits = 0;
  int64_t group_rows = 0;  // rows of K that share a scale; K itself for one group
  bool symmetric = false;  // every zero is 2^(bits-1)
  bool order = false;      // rows are sorted by group
  bool zero_at_0 = false;  // some zero is 0
  // For "mlx".
  absl::string_view mode;
  bool global_scale = false;
  bool dense = false;  // it became the tensor "weight" of floats

  int64_t groups() const { return (k + group_rows - 1) / group_rows; }
};
LinearFacts FactsOf(const HostWeight& weight);

struct EncodedLinear {
  std::vector<NewTensor> tensors;
  LinearFacts facts;
};

struct EncodeOptions {
  std::string bias_dtype = "F16";  // holds the bias exactly
  std::string dtype;               // of dense weights: "F16", "BF16", "F32"
};

// Everything that was encoded, for the settings.
struct FolderFacts {
  std::vector<std::pair<std::string, LinearFacts>> linears;  // by path
  std::vector<std::string> dense;  // paths of linears that stay as they are
  bool rtn = false;                // codes were made by rounding to nearest
  bool search = false;             // with a search for the range
};

inline constexpr DType kHalfScale[] = {DType::kFp16, DType::kBf16};
inline constexpr DType kAnyScale[] = {DType::kFp16, DType::kBf16, DType::kFp32};

// The weights that a format can hold, brought into this form where every element keeps its bits:
// integer codes, a scale for each group of a column, no outer scale, and zeros that are one integer
// for all (where they happen to be), stored integers, or real ones before the scale.
struct Limits {
  absl::Span<const int> widths;                 // of codes, in ascending order
  absl::Span<const DType> scales = kHalfScale;  // the first that holds all of them is taken
  bool real_zeros = false;
  bool order = false;
  bool short_group = false;  // the last one
};

struct Target {
  absl::string_view name;
  // The format whose Decode is the inverse; null of "dense".
  absl::string_view format;
  // Bits that `quantize` may make for it, and whether zeros may be other than 2^(bits-1).
  absl::Span<const int> widths;
  bool asymmetric = true;
  // `quantize` makes real zeros after the scale, in its type, and no integers.
  bool real_zeros = false;
  // K and N must be multiples of these.
  int64_t k_multiple = 1, n_multiple = 1;
  // The rows of a group that `quantize` makes unless told, and all that it may; empty: any.
  int64_t group_size = 128;
  absl::Span<const int64_t> group_sizes = {};
  Limits limits;                                           // without widths: it holds every weight
  absl::string_view settings_key = "quantization_config";  // in config.json

  // Adds the tensors of a weight that is within the limits, but for its bias. Null of "gguf".
  absl::Status (*encode)(HostWeight weight, const EncodeOptions& options, EncodedLinear* out);
  // The settings; null of "dense" and "gguf", and null JSON where no linear has any. INVALID_ARGUMENT naming the linear where
  // the settings cannot say what differs between linears.
  absl::StatusOr<nlohmann::ordered_json> (*settings)(const FolderFacts& facts);

  // INVALID_ARGUMENT naming the part that the format cannot hold, what it has and what the format
  // expects: what is encoded has, bit for bit, the elements of the weight.
  absl::StatusOr<EncodedLinear> Encode(HostWeight weight, const EncodeOptions& options) const;
};

extern const Target kAwqTarget, kGemliteTarget, kFasterTransformerTarget,
    kDenseTarget;                                           // uniform.cc
extern const Target kMlxTarget, kGgufTarget;                // mlx.cc
extern const Target kGptqTarget, kCompressedTensorsTarget;  // mixed.cc

absl::Span<const Target* const> AllTargets();
// Null when there is none of that name.
const Target* TargetNamed(absl::string_view name);

// --- Functions that several targets share ---

// Brings a weight within the limits; no element changes a bit. INVALID_ARGUMENT naming the part that
// does not fit. The codes may be absent.
absl::Status Normalise(const Limits& limits, HostWeight* weight);

// Codes [N, K] in CodeBits(bits) bits each, low bits first, of a weight without an order. Where
// `zero` is not -1, each less its integer zero and plus `zero`, which fits.
std::vector<uint8_t> CodesByColumn(const HostWeight& weight, int bits, int zero);

// Packs codes [rows, cols], one to a byte, into words [rows, ceil(cols * bits / 32)], from the low
// bits on: a code of 3, 5, 6 or 7 bits may go on in the next word. Every row fills its own words.
std::vector<uint32_t> DenseWords(absl::Span<const uint8_t> codes, int64_t rows, int64_t cols,
                                 int bits);

// Columns [begin, end) of W, each a row of K elements rounded once to FP16, BF16 or FP32.
// INVALID_ARGUMENT naming an element beyond the range of the type.
absl::Status FillRows(const HostWeight& weight, DType type, int64_t begin, int64_t end,
                      uint8_t* to);

// The codes of a weight as words I32 [ceil(K * bits / 32), N], along K.
std::vector<uint8_t> WordsAlongRows(const HostWeight& weight);

std::vector<uint8_t> BytesOf(absl::Span<const uint32_t> words);

// "F16", "BF16", "F32".
std::string TypeName(DType dtype);

// The settings' group_size for a format that has one for all linears: -1 where all have one group.
// INVALID_ARGUMENT naming two linears that differ.
absl::StatusOr<int64_t> OneGroupSize(const FolderFacts& facts);
// Likewise the bits of a code.
absl::StatusOr<int> OneWidth(const FolderFacts& facts);

// Sets "meta" of the settings to how the codes were made, where rounding to nearest made them.
void SetQuantizer(const FolderFacts& facts, nlohmann::ordered_json* settings);

// Integer codes of a width that is not among `widths` become codes of the least one above it that
// is stored in as many bits, where there is one. No element changes.
void Widen(absl::Span<const int> widths, HostWeight* weight);

}  // namespace awqd::tools
