// The steps before and after a row's product, the same for every row of a backend:
//
//   x --transform, prologue--> x' --product--> sums --epilogue--> y
//
// The transform multiplies x by the weight's factor and then blocks of it by a Hadamard matrix. The
// prologue brings the columns of x into the order of stored rows, multiplies them by the factor
// where there was no transform, and converts them to the form that the row reads; for quantised
// activations it rounds them to 8 bits. The epilogue adds the bias, applies the activation function
// and rounds. A step without work does not run: the row then reads the caller's x, or writes y with
// its bias.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/registry.h"

namespace awqd {

// out = (x * factor) H by blocks, as TransformBlock of exact.h has it in FP32. The result is FP32;
// on GPUs it is rounded to the type of x where the row reads more than 8 bits.
struct TransformArgs {
  ConstMatrixView x;              // [M, K], the caller's; a floating type
  const float* factor = nullptr;  // FP32 [K] or null
  Hadamard hadamard;
  InputForm form = InputForm::kAny;  // that the row reads
  void* out = nullptr;               // 4 * M * K bytes, 256-byte aligned
};

struct PrologueArgs {
  ConstMatrixView x;               // [M, K], the caller's, or the result of the transform
  const int32_t* order = nullptr;  // int32 [K] or null
  const float* factor = nullptr;   // FP32 [K] by in-feature, or null
  InputForm form = InputForm::kAny;
  // With InputForm::kQuantized, for x' (by stored rows, times the factor) in FP32:
  //   a = max |x'| / 127 of the token, or 1 where that is 0; for kStatic scales[m]
  //   q = x' / a rounded to nearest even, within [-127, 127]; for kStatic within [-128, 127]
  // With any form and a quantisation to E4M3:
  //   a = max |x'| / 448 of the token, or of its block of 128, or 1 where that is 0; or scales[m]
  //   q = x' / a rounded to the nearest E4M3, within [-448, 448]
  // kTensorCoreFloat8 has q and a. Other forms have a * q, rounded to the type of x on GPUs; or with
  // kTensorCore q in FP16 beside a.
  // For E4M3 x, which has neither order of blocks nor factor, q = x and a is of `scales`.
  // A token, or its block, that holds a NaN or an infinity has q = 0 and a = NaN, so that its result
  // is NaN.
  ActivationQuantization quantization = ActivationQuantization::kNone;
  // FP32 [M], where HasGivenScales; of E4M3 x with kFloat8PerBlock [M, ceil(K / 128)].
  const float* scales = nullptr;
  // As in GroupedArgs.
  const int32_t* gather = nullptr;
  const GateArgs* gate = nullptr;
  int64_t count = 0;  // M; 0: the rows of x
  RowMask mask;       // of which rows to E4M3 are made
  float sums_factor = 1;
  void* out = nullptr;  // Steps::prologue_bytes bytes
};

// The result of the prologue: rows of x' in `x`, `stride` elements apart, and the factors of sums as
// MatmulArgs::x_scale and x_scale_stride.
struct PrologueResult {
  ConstMatrixView x;
  int64_t stride = 0;
  const float* scale = nullptr;
  int64_t scale_stride = 0;
};

// y = round(act(sums + bias)).
struct EpilogueArgs {
  const float* sums = nullptr;  // [rows, cols], ld_sums apart; may be the memory of y
  int64_t ld_sums = 0;
  const float* bias = nullptr;  // FP32 [cols] or null
  ActivationFunction activation = ActivationFunction::kNone;
  void* y = nullptr;
  int64_t ld_y = 0;
  DType y_dtype = DType::kFp16;
  int64_t rows = 0;
  int64_t cols = 0;
  RowMask mask;  // on GPUs: rows of y that it has not stay as they are
};

// Rows [row_begin, row_begin + rows) by in-feature of a block that was decoded by stored rows.
struct ReorderArgs {
  const void* in = nullptr;  // [K, cols] by stored rows
  const int32_t* order = nullptr;
  int64_t k = 0;
  int64_t cols = 0;
  int64_t element_bytes = 0;
  int64_t row_begin = 0;
  int64_t rows = 0;
  void* out = nullptr;  // [rows], ld_out elements apart
  int64_t ld_out = 0;
};

// Results between the steps of experts have 16 bits on GPUs from so many rows on, because moving
// them takes long then (128 experts of 2048 x 768, 1024 tokens, H200, 2026-11-29: 245 us instead of
// 262). FP16 holds them times kNarrowFactor, so that what is somewhat beyond its range does not
// overflow.
inline constexpr int64_t kNarrowRows = 1024;
inline constexpr float kNarrowFactor = 1.0f / 16;
constexpr float NarrowFactor(DType dtype) { return dtype == DType::kFp16 ? kNarrowFactor : 1; }

// Sorts choices, each an expert of one token, by expert; those of one keep their order. On GPUs a
// kernel must come between these results and a product that reads a table made of them, because
// products read tables before earlier kernels are done: GatherRows.
struct SortArgs {
  const int32_t* ids = nullptr;  // int32 [choices]; outside [0, experts): the choice gets no row
  int64_t choices = 0;           // below 2^31
  int64_t top_k = 1;             // choices of each token
  int64_t experts = 0;
  int32_t* ends = nullptr;    // [experts]: where the rows of each end
  int32_t* tokens = nullptr;  // [choices]: the token of each row; 0 past the last row
  int32_t* rows = nullptr;    // [choices]: the row of each; -1: none
};

// The parts of an expert that a grouped product reads.
struct ExpertParts {
  const uint8_t* codes = nullptr;
  const float* outer = nullptr;
  const float* bias = nullptr;
};

// Makes GroupedArgs::table on a GPU; its last entries may have no rows. With GroupedArgs::mask the
// product may come next.
struct GroupedTableArgs {
  const GroupedArgs* product = nullptr;  // with device_experts
  int64_t tile = 0;                      // KernelRow::grouped_tile
  const int32_t* ends = nullptr;         // SortArgs::ends; null with GroupedArgs::mask
  const ExpertParts* parts[2] = {};      // [experts] of each stack, in the device's memory
  void* table = nullptr;                 // GroupedTableBytes
};

// out[i] = in[rows[i]]: brings rows into the order of the experts that multiply them.
struct GatherArgs {
  const void* in = nullptr;
  const int32_t* rows = nullptr;  // int32 [count]
  int64_t count = 0;
  int64_t row_bytes = 0;
  void* out = nullptr;  // [count], not the memory of `in`
  // On GPUs, or null: FP32 [count], all of them become kNarrowFactor.
  float* factors = nullptr;
};

// gate[i] = GateFloat(gate[i], up[i]) of exact.h: the middle of a gated MLP. With `half`, on GPUs
// only, the result goes there instead, as the prologue converts FP32 rows to FP16: each row times
// its own power of two. Then gate and up may have 16 bits, times NarrowFactor(dtype).
struct GateArgs {
  void* gate = nullptr;
  const void* up = nullptr;
  int64_t count = 0;
  ActivationFunction activation = ActivationFunction::kNone;
  GateParameters parameters = {};
  uint16_t* half = nullptr;     // FP16 [count / cols, cols]
  int64_t cols = 0;             // columns of `half`
  float* half_scale = nullptr;  // FP32 [count / cols]: factor of the sums of its rows
  DType dtype = DType::kFp32;   // of gate and up
  float sums_factor = 1;        // another factor of those sums
};

// out[i] = sigmoid(sum over k of x[i, k] * gates[which[i], k]), summed in an order that depends on K
// alone: the gate of a shared expert (Qwen2MoeSparseMoeBlock of transformers).
struct TokenGateArgs {
  ConstMatrixView x;               // [tokens, K], a floating type, or E4M3 times `scales`
  const float* gates = nullptr;    // FP32 [.., K]
  const int32_t* which = nullptr;  // int32 [tokens]
  // FP32 [tokens, ceil(K / scaled)], one for each `scaled` in-features of a token; null: all are 1.
  const float* scales = nullptr;
  int64_t scaled = 0;
  float* out = nullptr;  // FP32 [tokens]
};

// y[i, n] = round(sum over j of weights[i * terms + j] * in[rows[i * terms + j], n]), added in FP32
// in the order of j, so that the bits do not depend on the order of the rows. A row below 0 is left
// out. `added` comes last.
struct CombineArgs {
  const void* in = nullptr;  // [.., cols] of in_dtype; of 16 bits on GPUs, times NarrowFactor
  int64_t cols = 0;
  const int32_t* rows = nullptr;   // int32 [count * terms]
  const float* weights = nullptr;  // FP32 [count * terms], or null: all are 1
  int64_t count = 0;
  int64_t terms = 1;
  void* y = nullptr;  // [count, cols]
  DType y_dtype = DType::kFp16;
  DType in_dtype = DType::kFp32;
  const float* added = nullptr;          // FP32 [count, cols], or null
  const float* added_weights = nullptr;  // FP32 [count], or null: all are 1
};

struct Steps {
  // Enqueues the transform and returns where its result will be.
  absl::StatusOr<ConstMatrixView> (*transform_rows)(const TransformArgs&, Device&, StreamView);
  // Whether a row that reads the form `form` can read x where it is.
  bool (*needs_no_prologue)(InputForm form, const ConstMatrixView& x);
  // Enough for every quantisation.
  int64_t (*prologue_bytes)(InputForm form, int64_t m, int64_t k);
  absl::Status (*run_prologue)(const PrologueArgs&, PrologueResult* out, Device&, StreamView);
  absl::Status (*run_epilogue)(const EpilogueArgs&, Device&, StreamView);
  absl::Status (*reorder_rows)(const ReorderArgs&, Device&, StreamView);
  // Steps between the products of experts and of a gated MLP.
  absl::Status (*gather_rows)(const GatherArgs&, Device&, StreamView);
  absl::Status (*multiply_by_up)(const GateArgs&, Device&, StreamView);
  absl::Status (*gate_tokens)(const TokenGateArgs&, Device&, StreamView);
  absl::Status (*combine_rows)(const CombineArgs&, Device&, StreamView);
  absl::Status (*sort_choices)(const SortArgs&, Device&, StreamView);
  // Null and 0 where no row is of grouped products.
  absl::Status (*make_grouped_table)(const GroupedTableArgs&, Device&, StreamView) = nullptr;
  int64_t grouped_tile_bytes = 0;  // of an entry of the table
};

}  // namespace awqd
