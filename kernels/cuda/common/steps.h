// The steps before and after a row's product on CUDA devices (kernels/steps.h).
#pragma once

#include <cstdint>

#include "kernels/base/status.h"
#include "kernels/cuda/core/error.h"
#include "kernels/steps.h"

namespace awqd::cuda {

absl::StatusOr<ConstMatrixView> TransformRows(const TransformArgs& args, Device& device,
                                              StreamView stream);
bool NeedsNoPrologue(InputForm form, const ConstMatrixView& x);
int64_t PrologueBytes(InputForm form, int64_t m, int64_t k);
absl::Status RunPrologue(const PrologueArgs& args, PrologueResult* out, Device& device,
                         StreamView stream);
absl::Status RunEpilogue(const EpilogueArgs& args, Device& device, StreamView stream);
absl::Status ReorderRows(const ReorderArgs& args, Device& device, StreamView stream);
absl::Status GatherRows(const GatherArgs& args, Device& device, StreamView stream);
absl::Status MultiplyByUp(const GateArgs& args, Device& device, StreamView stream);
absl::Status GateTokens(const TokenGateArgs& args, Device& device, StreamView stream);
absl::Status CombineRows(const CombineArgs& args, Device& device, StreamView stream);
absl::Status SortChoices(const SortArgs& args, Device& device, StreamView stream);
absl::Status MakeGroupedTable(const GroupedTableArgs& args, Device& device, StreamView stream);

// The prologue of activations that are rounded to E4M3. `scales`: Float8ScalesBytes with
// kTensorCoreFloat8, else one for each row.
absl::Status RunPrologueFloat8(const PrologueArgs& args, int64_t stride, float* scales,
                               PrologueResult* out, StreamView stream);
int64_t Float8ScalesBytes(int64_t rows, int64_t k);

// The prologue of a weight with an order: rows of 16-bit activations in the order of its stored
// rows.
struct OrderedRows {
  const uint16_t* x;     // [rows, k]
  const int32_t* order;  // [k]: where element i of an output row comes from
  int64_t rows;
  int64_t k;
  uint16_t* out;   // [rows, stride], on 16 bytes; zero from k to the stride
  int64_t stride;  // a multiple of 8
};

// Whether a row fits a block's shared memory, through which PrologueOrdered takes it.
bool CanRunPrologueOrdered(const OrderedRows& rows, const DeviceInfo& device);
absl::Status PrologueOrdered(const OrderedRows& rows, const DeviceInfo& device, StreamView stream);

}  // namespace awqd::cuda
