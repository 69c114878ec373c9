// HostWeight: the parts of a weight in host memory, in no kernel's order. DeviceWeight: the weight
// in a device's memory, in one layout.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/base/math.h"
#include "kernels/device.h"
#include "kernels/scheme.h"
#include "kernels/types.h"

namespace awqd {

struct KernelRow;
struct Layout;

// The properties of a weight by which layouts and kernels are chosen and sized.
struct WeightShape {
  int64_t k = 0;  // in features (reduction)
  int64_t n = 0;  // out features
  QuantizationScheme scheme;
  // The least number of octaves that contains the scales of every column, zeros excluded, for
  // layouts whose scales have a narrower exponent. Measured for BF16, FP32 and E8M0 scales, and for
  // the columns of FP16 scales that large_scales concerns; else 0.
  int scale_octaves = 0;
  // Some code times its scale, less a real zero, may be a finite number beyond FP16. Measured where
  // rows round such products to FP16: FP16 scales, real zeros, and FP32 scales of groups.
  bool large_scales = false;

  // The number of rows of K that share a scale, and the number of such groups; the last group may
  // be short.
  int64_t group_rows() const { return scheme.block_rows == 0 ? k : scheme.block_rows; }
  int64_t groups() const { return CeilDiv(k, group_rows()); }
  int64_t block_cols() const { return scheme.block_cols == 0 ? n : scheme.block_cols; }
  int64_t column_blocks() const { return CeilDiv(n, block_cols()); }
  int64_t cells() const { return groups() * column_blocks(); }  // cells with a scale and a zero

  // Rows of codes, and their bytes, as a HostWeight and the layout "plain" have them.
  int64_t code_rows() const { return k / scheme.rows_of_code(); }
  int64_t row_bytes() const { return CeilDiv(n * CodeBits(scheme), 8); }
};

// Returns "" when the products of any INT8 activations and the weight are integers that INT32
// holds, else the reason against it. Pure.
std::string WhyNoIntegers(const WeightShape& shape);

// Returns "" when quantised activations can multiply the weight, that is when its codes are
// integers, with any zeros and scales; else the reason against it. Pure. Each kernel handles long
// integer sums by itself: the CPU's continue in INT64.
std::string WhyNoQuantizedActivations(const WeightShape& shape);

// How a checkpoint wants activations quantised before a product with the weight. Clients are told,
// and the server does it when they request it.
struct DeclaredActivations {
  ActivationQuantization how = ActivationQuantization::kNone;  // kNone: the checkpoint has no wish
  float scale = 0;                                             // where HasGivenScales
};

// A transform of activations before a product: each block of `size` in-features is multiplied by
// the Hadamard matrix H[i, j] = scale * (-1)^(number of ones in i & j), which is symmetric.
struct Hadamard {
  static constexpr int64_t kMostRows = 16384;  // a block of FP32 in a GPU's shared memory

  int64_t size = 0;  // a power of two from 2 to kMostRows that divides K; 0: no transform
  float scale = 0;   // 1 / sqrt(size), as a checkpoint rounded it; positive and finite

  friend bool operator==(const Hadamard&, const Hadamard&) = default;
};

// A decoded weight; every checkpoint format decodes to this.
struct HostWeight {
  int64_t k = 0;
  int64_t n = 0;
  QuantizationScheme scheme;
  std::string format;  // name of the checkpoint format it came from

  // Codes [code_rows(), N], row-major, each in code_bits() bits, least significant first along N.
  // Every row begins with a new byte, and bits beyond N are 0. A vector code is a whole block; of a
  // trellis 16 columns are a tile.
  std::vector<uint8_t> codes;
  // Zeros [groups, column blocks]: for kStored one byte each, for the real kinds the raw bits of
  // scheme.zero_dtype; empty for kConstant.
  std::vector<uint8_t> zeros;
  // Scales [groups, column blocks] as stored: raw bits of scheme.scale_dtype; empty without
  // scales.
  std::vector<uint8_t> scales;
  std::vector<float> table;    // 16 values for kTable
  std::vector<float> outer;    // 1 value for OuterKind::kOne, N for kColumn
  std::vector<int32_t> order;  // [K], or empty: row i is in-feature order[i]
  std::vector<float> factor;   // [K] by in-feature, or empty: factors of the activations
  Hadamard hadamard;           // of the activations times their factors
  // [N], or empty. FP32 holds FP16 and BF16 values exactly, here and in the parts above.
  std::vector<float> bias;
  DeclaredActivations activations;

  // Leaves out the properties that ShapeOf measures from the scales.
  WeightShape shape() const { return {k, n, scheme}; }
  int code_bits() const { return CodeBits(scheme); }
  int64_t code_rows() const { return shape().code_rows(); }
  int64_t group_rows() const { return shape().group_rows(); }
  int64_t groups() const { return shape().groups(); }
  int64_t row_bytes() const { return CeilDiv(n * code_bits(), 8); }
  // Whether W of x @ W is another matrix than the stored one: a factor or a transform is in it.
  bool transforms_input() const { return !factor.empty() || hadamard.size > 0; }
  // The block of vector codes, or the tile of a trellis, that `row` is in. `col` is the first of a
  // tile.
  const uint8_t* Block(int64_t row, int64_t col) const {
    return codes.data() + row / scheme.rows_of_code() * row_bytes() + col * code_bits() / 8;
  }

  // For codes of single elements.
  int Code(int64_t row, int64_t col) const {
    const int bits = code_bits();
    const int64_t bit = col * bits;
    return (codes[row * row_bytes() + bit / 8] >> (bit % 8)) & ((1 << bits) - 1);
  }
  // The codes of 8 columns from `col`, a multiple of 8, in code_bits() bits each, as in `codes`;
  // zeros for columns beyond N.
  uint64_t EightCodes(int64_t row, int64_t col) const;
  // The index of an element's zero and scale in their parts.
  int64_t Cell(int64_t group, int64_t col) const {
    return scheme.block_cols == 1 ? group * n + col
                                  : group * shape().column_blocks() + col / shape().block_cols();
  }
  // For kStored and kConstant.
  int Zero(int64_t group, int64_t col) const {
    return zeros.empty() ? scheme.zero : zeros[Cell(group, col)];
  }
  // For the real kinds; exact.
  float RealZero(int64_t group, int64_t col) const;
  // The stored scale, exactly; 1 without scales.
  float Scale(int64_t group, int64_t col) const;
  float Outer(int64_t col) const {
    return outer.empty() ? 1.0f : outer[scheme.outer == OuterKind::kOne ? 0 : col];
  }
};

// INVALID_ARGUMENT names the part: the scheme is illegal, a part has the wrong number of
// bytes, a code or a zero does not fit its bits, an outer, a factor or a table is NaN, an order is
// not a permutation, or a transform does not fit K. Scales may be any number and follow IEEE
// arithmetic.
absl::Status Validate(const HostWeight& weight);
absl::Status Validate(const Hadamard& hadamard, int64_t k);
// Validates everything but the codes, which may be absent.
absl::Status ValidateBesideCodes(const HostWeight& weight);

// Whether an integer of the codes times `scale`, an FP16 number, may be a finite number beyond
// FP16. An infinite scale does not count, because its products are infinite anyway.
bool PassesHalf(const QuantizationScheme& scheme, float scale);

// The properties of a weight, including those that are measured from its scales.
WeightShape ShapeOf(const HostWeight& weight);

// The parts of a packed weight. A layout determines the bytes of codes, scales and zeros; the other
// parts are the same in all layouts.
enum class Part : uint8_t {
  kCodes,   // the layout's codes, or its records
  kScales,  // where the layout keeps scales apart from the codes
  kZeros,   // likewise
  kTable,   // FP32 [16]
  kOuter,   // FP32 [N]: factor of the sums of a column
  kOrder,   // int32 [K]
  kFactor,  // FP32 [K]
  kBias,    // FP32 [N]
};
inline constexpr int kParts = 8;
absl::string_view Name(Part part);  // "codes", ...

// The places of the parts in one allocation, one after the other, each 256-byte aligned.
class Sections {
 public:
  static constexpr int64_t kAlign = 256;

  // Appends a part. Does nothing for 0 bytes.
  void Add(Part part, int64_t bytes) {
    if (bytes == 0) return;
    at_[static_cast<int>(part)] = {total_, bytes};
    total_ += RoundUp(bytes, kAlign);
  }
  bool Has(Part part) const { return bytes(part) > 0; }
  int64_t offset(Part part) const { return at_[static_cast<int>(part)].offset; }
  int64_t bytes(Part part) const { return at_[static_cast<int>(part)].bytes; }
  int64_t total() const { return total_; }

 private:
  struct Extent {
    int64_t offset = 0;
    int64_t bytes = 0;
  };
  std::array<Extent, kParts> at_ = {};
  int64_t total_ = 0;
};

// The token counts that a kernel serves. Plans are made once at load and read by requests.
struct PlanEntry {
  Path path;
  int64_t min_m = 0;
  int64_t max_m = -1;  // inclusive; -1: no upper bound
  const KernelRow* row = nullptr;
};
struct RefusedRow {
  std::string name;
  std::string reason;
};
struct WeightPlan {
  std::vector<PlanEntry> matmul;  // ascending m within a path
  const KernelRow* dequantize = nullptr;
  // For INT8 activations without and with scales, and for E4M3: ascending m; may be empty.
  std::vector<PlanEntry> integer, quantized, float8;
  // For a stack of weights like this one, by ascending average number of rows of an expert; may be
  // empty. The second for E4M3 activations.
  std::vector<PlanEntry> grouped, grouped_float8;
  std::vector<RefusedRow> refused;

  // The row for m tokens on `path`; null if the path has none.
  const KernelRow* Matmul(Path path, int64_t m) const;
  // The row for m tokens of these; or null.
  const KernelRow* Integer(int64_t m) const;
  const KernelRow* Quantized(int64_t m) const;
  const KernelRow* Float8(int64_t m) const;
  // The row for a stack whose experts have this many rows on average, or null.
  const KernelRow* Grouped(int64_t rows) const;
  const KernelRow* GroupedFloat8(int64_t rows) const;
};

// A weight in a device's memory. Immutable after creation; freed with its last owner.
struct DeviceWeight {
  WeightShape shape;
  std::string format;
  const Layout* layout = nullptr;
  Sections sections;
  Buffer storage;  // device memory, sections.total() bytes
  Device* device = nullptr;
  Hadamard hadamard;
  DeclaredActivations activations;
  WeightPlan plan;

  // Null if the weight has no such part.
  const uint8_t* part(Part which) const {
    if (!sections.Has(which)) return nullptr;
    return static_cast<const uint8_t*>(storage.data()) + sections.offset(which);
  }
  const uint8_t* codes() const { return part(Part::kCodes); }
  const uint8_t* scales() const { return part(Part::kScales); }
  const uint8_t* zeros() const { return part(Part::kZeros); }
  const float* table() const { return Floats(Part::kTable); }
  const float* outer() const { return Floats(Part::kOuter); }
  const float* factor() const { return Floats(Part::kFactor); }
  const float* bias() const { return Floats(Part::kBias); }
  const int32_t* order() const { return reinterpret_cast<const int32_t*>(part(Part::kOrder)); }
  int64_t bytes() const { return storage.size(); }
  // As HostWeight has it.
  bool transforms_input() const { return factor() != nullptr || hadamard.size > 0; }

 private:
  const float* Floats(Part which) const { return reinterpret_cast<const float*>(part(which)); }
};

}  // namespace awqd
