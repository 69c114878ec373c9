// The kernel registry: one row per kernel, with what it claims to serve.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/layouts/layout.h"
#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd {

struct GateArgs;  // kernels/steps.h

// y = act(x @ W + bias), accumulated in FP32 and rounded once to y's dtype. For INT8 activations
// without scales, y = x @ W in INT32, exactly, without bias and activation function. For quantised
// activations, y = act(a * (q @ W) + bias) with INT8 q and a scale a for each token, where the sums
// of q times codes are exact integers (kernels.h, ProductOf). All pointers are to the weight's
// device memory.
struct MatmulArgs {
  const DeviceWeight* weight = nullptr;
  // [M, K], FP16, BF16, FP32, INT8 or E4M3, from the caller. A row of the registry gets the result
  // of the prologue: ordered by stored rows, multiplied by the factor, in a type and at an
  // alignment that the row accepts.
  ConstMatrixView x;
  MatrixView y;                 // [M, N], FP16, BF16 or FP32; INT32 of INT8
  const float* bias = nullptr;  // FP32 [N], or null for none
  // At least WorkspaceBytes, or for a row its workspace_bytes; 256-byte aligned. The contents are
  // overwritten.
  void* workspace = nullptr;
  ActivationFunction activation = ActivationFunction::kNone;  // kNone for a row of the registry
  // Rounds floating x to 8 bits first; kNone for INT8 x and for a row of the registry. Of E4M3 x it
  // says what scales there are: kFloat8Static or kFloat8PerBlock.
  ActivationQuantization quantization = ActivationQuantization::kNone;
  // FP32 [M], positive: the scale of each token, for INT8 x and where HasGivenScales; of E4M3 x with
  // kFloat8PerBlock [M, ceil(K / 128)]; else null. A row of the registry reads x_scale instead.
  const float* scales = nullptr;

  // Set for rows of the registry alone, by the prologue.
  int64_t x_stride = 0;            // elements from one row of x to the next; 0: K
  const float* x_scale = nullptr;  // FP32 [M]: factor of each row of sums; null: 1
  // With kFloat8PerBlock: x_scale is [blocks of 128 of K, x_scale_stride], a factor for each row of
  // a block's sums. 0: as above.
  int64_t x_scale_stride = 0;
  bool from_prologue = false;  // the kernel started just before writes x
};

// Rows of experts that have room for as many each, of which the first few are valid. On a device
// that the host cannot read, kernels take a count below 0 for 0, and one above max_rows for that.
struct RowMask {
  const int32_t* counts = nullptr;  // int32 [experts]
  int64_t max_rows = 0;             // 0: there is no mask

  constexpr int32_t CountOf(int64_t expert) const {
    const int64_t count = counts[expert];
    return static_cast<int32_t>(count < 0 ? 0 : count > max_rows ? max_rows : count);
  }
  constexpr bool Has(int64_t row) const {
    return max_rows == 0 || row % max_rows < counts[row / max_rows];
  }
};

// The products of a stack of experts: y = x @ W[e] + bias[e] for the rows of each expert e, which
// are contiguous. All experts have the shape and the plan of the first; none has an order, a factor
// or a transform. Several stacks may multiply the same rows: their results follow each other in y.
struct GroupedArgs {
  absl::Span<const DeviceWeight* const> experts;  // [stacks * experts]
  absl::Span<const int64_t> ends;                 // end of each expert's rows, in host memory
  ConstMatrixView x;                              // [rows, K], as in MatmulArgs
  MatrixView y;                                   // [stacks * rows, N]
  // FP32 [stacks * experts, N], or null for the weights' own.
  const float* bias = nullptr;
  // FP32 [rows]: factor of the sums of each row; null: 1. The prologue sets it for FP32 x and for
  // x that it rounds.
  const float* x_scale = nullptr;
  // The result of KernelRow::grouped_table, in the device's memory, 256-byte aligned.
  const void* table = nullptr;
  // Not 0: the experts of a stack, of whose rows the device alone knows how many each has. `ends` is
  // empty then, `experts` has the first of each stack, which all others are like (IsGroupable), and
  // MakeGroupedTable has made `table`. Rows of x at the end may belong to no expert; theirs of y
  // stay as they are.
  int64_t device_experts = 0;
  // With device_experts: rows of x that it has not are not computed, and theirs of y stay as they are.
  RowMask mask;
  int64_t expected = 0;  // with device_experts: the rows of each that tiles are for; 0: the mean
  void* workspace = nullptr;  // GroupedWorkspaceBytes; 256-byte aligned
  ActivationFunction activation = ActivationFunction::kNone;  // kNone for a row of the registry
  // kNone, or one that rounds floating x to E4M3 first; x_scale is null then.
  ActivationQuantization quantization = ActivationQuantization::kNone;
  const float* scales = nullptr;  // FP32 [rows], positive, where HasGivenScales; else null
  // With a quantization on GPUs the prologue may make the rows that it rounds, instead of steps
  // before it: row i is row gather[i] of x, or the middle of a gated MLP, where x is a shape alone.
  const int32_t* gather = nullptr;  // int32 [rows], or null
  const GateArgs* gate = nullptr;   // without `half`; cols is a multiple of 4; or null
  float sums_factor = 1;            // with a quantization on GPUs: another factor of all sums

  // Set by the prologue, for rows of the registry alone.
  int64_t x_stride = 0;
  int64_t x_scale_stride = 0;  // as in MatmulArgs

  int64_t stacks() const {
    return static_cast<int64_t>(experts.size() / (device_experts > 0 ? 1 : ends.size()));
  }
  int64_t rows() const { return device_experts > 0 ? x.rows : ends.empty() ? 0 : ends.back(); }
  // The number of experts that have rows; with device_experts, the most that can have some.
  int64_t active() const {
    if (device_experts > 0) return std::min(device_experts, x.rows);
    int64_t count = 0, begin = 0;
    for (const int64_t end : ends) count += end > std::exchange(begin, end);
    return count;
  }
  // Rows of each of those on average.
  int64_t mean() const {
    const int64_t count = std::max<int64_t>(active(), 1);
    return expected > 0 ? expected : (rows() + count - 1) / count;
  }
};

// out = W[row_begin : row_begin + out.rows, col_begin : col_begin + out.cols], with the bits of
// exact.h. Rows are in-features for the caller, and stored rows for a row of the registry.
struct DequantizeArgs {
  const DeviceWeight* weight = nullptr;
  MatrixView out;
  int64_t row_begin = 0;
  int64_t col_begin = 0;
};

enum class Op : uint8_t {
  kDequantize,
  kMatmul,         // floating activations
  kIntegerMatmul,  // y = x @ (code - zero), INT8 to INT32, exact
  // Floating y = x_scale * (x @ W) + bias for INT8 x, whose products with codes are summed exactly.
  kQuantizedActivations,
  // The same for E4M3 x with a scale for each token, or for each token and 128 of K. Without such a
  // row the rows of kMatmul multiply the rounded x.
  kFloat8Activations,
  kGroupedMatmul,  // floating activations, a stack of weights
  // A stack of weights and E4M3 x, as kFloat8Activations.
  kGroupedFloat8,
};

// The form of activations that a row reads.
enum class InputForm : uint8_t {
  kAny,         // any floating type, rows of K elements
  kTensorCore,  // FP16 or BF16, rows that begin on 16 bytes, zero from K to a multiple of 8
  // INT8, rows that are zero from K to a multiple of 128, every 64 elements in the order of a
  // backend's matrix instruction.
  kTensorCoreIntegers,
  kTensorCoreFloat8,  // the same of E4M3
  kQuantized,         // INT8, rows of K elements, and an FP32 scale for each (x_scale)
};

constexpr uint32_t MaskOf(ZeroKind kind) { return 1u << static_cast<int>(kind); }
constexpr uint32_t MaskOf(CodeKind kind) { return 1u << static_cast<int>(kind); }
inline constexpr uint32_t kIntegerZeros = MaskOf(ZeroKind::kConstant) | MaskOf(ZeroKind::kStored);
inline constexpr uint32_t kRealZeros = MaskOf(ZeroKind::kRealBefore) | MaskOf(ZeroKind::kRealAfter);

// The schemes that a row serves. Order, factor, transform, outer scale and bias need no claim: the
// prologue, the layout's Part::kOuter and the epilogue provide them for every row.
struct Claims {
  uint32_t codes = MaskOf(CodeKind::kUnsigned);
  uint32_t bits = 0;  // bit b: accepts unsigned codes of b bits
  uint32_t zeros = kIntegerZeros;
  DTypeMask scales = MaskOf(DType::kFp16) | MaskOf(DType::kBf16);
  // Group sizes are a multiple of this; one group of K always passes.
  int64_t group_multiple = 1;
  bool column_blocks = false;  // blocks of more than one column
};
// Every legal scheme whose codes are of single elements.
inline constexpr Claims kElementCodes = {
    .codes = MaskOf(CodeKind::kUnsigned) | MaskOf(CodeKind::kE2m1) | MaskOf(CodeKind::kE4m3) |
             MaskOf(CodeKind::kTable),
    .bits = 0b111111110,
    .zeros = kIntegerZeros | kRealZeros,
    .scales = kFloatingMask | MaskOf(DType::kE4m3) | MaskOf(DType::kE8m0) | MaskOf(DType::kInt8),
    .column_blocks = true};
// Vector codes alone.
inline constexpr Claims kVectorCodes = {.codes = MaskOf(CodeKind::kVector),
                                        .zeros = MaskOf(ZeroKind::kConstant),
                                        .scales = 0,
                                        .group_multiple = kVectorBlock};
// The trellis alone.
inline constexpr Claims kTrellis = {.codes = MaskOf(CodeKind::kTrellis),
                                    .zeros = MaskOf(ZeroKind::kConstant),
                                    .scales = 0,
                                    .group_multiple = kTrellisTile};
inline constexpr Claims kEverything = {
    .codes = kElementCodes.codes | kVectorCodes.codes | kTrellis.codes,
    .bits = kElementCodes.bits,
    .zeros = kElementCodes.zeros,
    .scales = kElementCodes.scales,
    .column_blocks = true};
// The schemes of integer products: integer codes and zeros, and no scale.
inline constexpr Claims kIntegers = {.bits = kEverything.bits, .scales = 0};
// The schemes of products of quantised activations: integer codes with any zeros and scales.
inline constexpr Claims kIntegerCodes = {.bits = kEverything.bits,
                                         .zeros = kEverything.zeros,
                                         .scales = kEverything.scales,
                                         .column_blocks = true};

struct KernelRow {
  // Begins with the path of the row's source beneath kernels/ without extension; also test filter
  // and metric label.
  absl::string_view name;
  Op op;
  Path path = Path::kFused;  // matmul only
  DeviceKind device = DeviceKind::kCpu;
  Claims claims;
  InputForm input_form = InputForm::kAny;  // matmul only
  DTypeMask inputs = kFloatingMask;        // dtypes of the caller's x
  DTypeMask outputs = kFloatingMask;       // dtypes of y
  // The layout that the row reads; null: any, through Layout::unpack (the reference) or another
  // row.
  const Layout* layout = nullptr;
  int min_arch = 0;  // CUDA: lowest compute capability x 10
  int max_arch = 0;  // CUDA: highest, 0 for no bound
  // Tokens that the row serves; of stacks, rows of each expert that has some, on average.
  int64_t min_m = 0;
  int64_t max_m = -1;  // inclusive; -1: no bound
  // The fewest tokens for which the row's priority counts; with fewer it serves only where no other
  // row does. Null: min_m.
  int64_t (*preferred_from)(const WeightShape&, const DeviceInfo&) = nullptr;
  // A fused matmul that was measured against decoding the weight first, on every shape of a model's
  // layers: the number of tokens from which that takes less time; kNeverDense: none. Null, and 0:
  // not measured.
  int64_t (*dense_from)(const WeightShape&, const DeviceInfo&) = nullptr;
  // A matmul whose bits for a token depend on that token and the weight alone: neither on M nor on
  // other tokens. Rows of one layout and device with this flag agree with each other, because a
  // plan may change from one to another as M grows.
  bool batch_invariant = false;
  int priority =
      0;  // larger wins among rows that support a weight; negative: only when forced by name
  // Further conditions: returns "", or the reason against the row. May be null.
  std::string (*refuses)(const WeightShape&, const DeviceInfo&) = nullptr;
  // Describes the tiles of a product of m tokens, for people. Null: always the same.
  std::string (*tile)(const WeightShape&, const DeviceInfo&, int64_t m) = nullptr;
  // Bytes of scratch memory for m tokens; null: none.
  int64_t (*workspace_bytes)(const WeightShape&, const DeviceInfo&, int64_t m) = nullptr;
  absl::Status (*matmul)(const MatmulArgs&, StreamView) = nullptr;
  absl::Status (*dequantize)(const DequantizeArgs&, StreamView) = nullptr;
  // For stacks: the contents of GroupedArgs::table, the rows of each of its tiles, and the products.
  std::string (*grouped_table)(const GroupedArgs&) = nullptr;
  int64_t (*grouped_tile)(const GroupedArgs&) = nullptr;
  absl::Status (*grouped)(const GroupedArgs&, StreamView) = nullptr;
};

// No product has so many tokens.
inline constexpr int64_t kNeverDense = std::numeric_limits<int64_t>::max();
inline int64_t NeverDense(const WeightShape&, const DeviceInfo&) { return kNeverDense; }

// The rows of all backends in this binary, in a fixed order.
absl::Span<const KernelRow* const> AllKernels();

}  // namespace awqd
