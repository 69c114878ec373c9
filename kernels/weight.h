// HostWeight: a weight by its parts, in host memory, in no kernel's order. DeviceWeight: the same
// in a device's memory, in one layout.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/base/math.h"
#include "kernels/description.h"
#include "kernels/device.h"
#include "kernels/types.h"

namespace awqd {

struct KernelRow;
struct Layout;

// Facts that layouts and kernels are chosen and sized by.
struct WeightShape {
  int64_t k = 0;  // in features (reduction)
  int64_t n = 0;  // out features
  WeightDescription description;
  // Least number of octaves that the scales of every column lie within, zeros left out: what a
  // layout with scales of a narrower exponent has to hold. Measured for BF16, FP32 and E8M0 scales,
  // and of FP16 scales for the columns that large_scales is about; else 0.
  int scale_octaves = 0;
  // Scales are FP16, and an integer of the codes times one may be a finite number that FP16 does
  // not hold.
  bool large_scales = false;

  // Rows of K that share a scale, and how often that is; the last group may be short.
  int64_t group_rows() const { return description.block_rows == 0 ? k : description.block_rows; }
  int64_t groups() const { return CeilDiv(k, group_rows()); }
  int64_t block_cols() const { return description.block_cols == 0 ? n : description.block_cols; }
  int64_t column_blocks() const { return CeilDiv(n, block_cols()); }
  int64_t cells() const { return groups() * column_blocks(); }  // that have a scale and a zero
};

// Empty when INT8 activations times the weight are integers that INT32 holds, whatever their
// values; else the reason why not. Pure.
std::string WhyNoIntegers(const WeightShape& shape);

// Empty when quantised activations can multiply the weight: its codes are integers, whatever its
// zeros and scales; else the reason why not. Pure. How long an integer sum may get is the business
// of each kernel: the CPU's go on in INT64.
std::string WhyNoQuantizedActivations(const WeightShape& shape);

// How a checkpoint says that activations are to be quantised before a product with the weight. It
// is told to clients, and done when they ask for it.
struct DeclaredActivations {
  ActivationQuantization how = ActivationQuantization::kNone;  // kNone: it says nothing
  float scale = 0;                                             // of kStatic
};

// What every checkpoint format decodes to.
struct HostWeight {
  int64_t k = 0;
  int64_t n = 0;
  WeightDescription description;
  std::string format;  // name of the checkpoint format it came from

  // Codes [K, N], row-major, each in code_bits() bits, least significant first along N; every row
  // begins with a byte of its own, and bits past N are 0.
  std::vector<uint8_t> codes;
  // Zeros [groups, column blocks]: of kStored one byte each, of the real kinds the raw bits of
  // description.zero_dtype; empty for kConstant.
  std::vector<uint8_t> zeros;
  // Scales [groups, column blocks] as stored, raw bits of description.scale_dtype; empty without.
  std::vector<uint8_t> scales;
  std::vector<float> table;    // 16 values of kTable
  std::vector<float> outer;    // 1 value of OuterKind::kOne, N of kColumn
  std::vector<int32_t> order;  // [K], or empty: row i is in-feature order[i]
  std::vector<float> factor;   // [K] by in-feature, or empty: what activations are multiplied by
  // [N], or empty. FP32 holds FP16 and BF16 values exactly, here and in the parts above.
  std::vector<float> bias;
  DeclaredActivations activations;

  // Without what is measured of the scales (ShapeOf).
  WeightShape shape() const { return {k, n, description}; }
  int code_bits() const { return CodeBits(description.bits); }
  int64_t group_rows() const { return shape().group_rows(); }
  int64_t groups() const { return shape().groups(); }
  int64_t row_bytes() const { return CeilDiv(n * code_bits(), 8); }

  int Code(int64_t row, int64_t col) const {
    const int bits = code_bits();
    const int64_t bit = col * bits;
    return (codes[row * row_bytes() + bit / 8] >> (bit % 8)) & ((1 << bits) - 1);
  }
  // The code_bits() bits each of the 8 columns from `col`, a multiple of 8, as they lie in `codes`;
  // of columns past N zeros.
  uint64_t EightCodes(int64_t row, int64_t col) const;
  // Where the zero and the scale of an element lie in their parts.
  int64_t Cell(int64_t group, int64_t col) const {
    return description.block_cols == 1
               ? group * n + col
               : group * shape().column_blocks() + col / shape().block_cols();
  }
  // Of kStored and kConstant.
  int Zero(int64_t group, int64_t col) const {
    return zeros.empty() ? description.zero : zeros[Cell(group, col)];
  }
  // Of the real kinds, exactly.
  float RealZero(int64_t group, int64_t col) const;
  // The stored scale, exactly; 1 without.
  float Scale(int64_t group, int64_t col) const;
  float Outer(int64_t col) const {
    return outer.empty() ? 1.0f : outer[description.outer == OuterKind::kOne ? 0 : col];
  }
};

// INVALID_ARGUMENT naming the part: the description is illegal, a part has the wrong number of
// bytes, a code or a zero does not fit its bits, an outer, a factor or a table is NaN, an order is
// no permutation. Scales may be any number: what they give is IEEE arithmetic's business.
absl::Status Validate(const HostWeight& weight);
// The same of all but the codes, which need not be there.
absl::Status ValidateBesideCodes(const HostWeight& weight);

// Whether an integer of the codes times `scale`, an FP16 number, may be one that FP16 does not
// hold. Infinite scales are none of these: what they give is infinite anyway.
bool PassesHalf(const WeightDescription& description, float scale);

// The facts of a weight, those that are measured of its scales included.
WeightShape ShapeOf(const HostWeight& weight);

// The parts of a packed weight. A layout says how many bytes it wants for codes, scales and zeros;
// the others are alike in all layouts.
enum class Part : uint8_t {
  kCodes,   // whatever the layout stores for the product: codes alone, or records
  kScales,  // where the layout keeps them apart from the codes
  kZeros,   // likewise
  kTable,   // FP32 [16]
  kOuter,   // FP32 [N]: what the sums of a column are multiplied by
  kOrder,   // int32 [K]
  kFactor,  // FP32 [K]
  kBias,    // FP32 [N]
};
inline constexpr int kParts = 8;
absl::string_view Name(Part part);  // "codes", ...

// Where the parts lie: one after the other in one allocation, each 256-byte aligned.
class Sections {
 public:
  static constexpr int64_t kAlign = 256;

  // Behind those that were added before. Nothing for 0 bytes.
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

// Which kernel serves which token counts; made once at load, indexed by requests.
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
  const KernelRow* integer = nullptr;  // of INT8 activations, at any m; null: takes none
  std::vector<PlanEntry> quantized;    // of quantised activations, ascending m; may be empty
  // Of a stack of weights like this one, ascending rows of an expert on average; may be empty.
  std::vector<PlanEntry> grouped;
  std::vector<RefusedRow> refused;

  // The row for m tokens on `path`, or null when the path has none.
  const KernelRow* Matmul(Path path, int64_t m) const;
  // The row for m quantised tokens, or null.
  const KernelRow* Quantized(int64_t m) const;
  // The row for a stack whose experts have so many rows on average, or null.
  const KernelRow* Grouped(int64_t rows) const;
};

// A weight in a device's memory. Immutable once made; freed when the last owner lets go.
struct DeviceWeight {
  WeightShape shape;
  std::string format;
  const Layout* layout = nullptr;
  Sections sections;
  Buffer storage;  // device memory, sections.total() bytes
  Device* device = nullptr;
  DeclaredActivations activations;
  WeightPlan plan;

  // Null where the weight has no such part.
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

 private:
  const float* Floats(Part which) const { return reinterpret_cast<const float*>(part(which)); }
};

}  // namespace awqd
