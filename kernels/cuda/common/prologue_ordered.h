// Stage for a weight with an order: rows of 16-bit activations in the order of its stored rows.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device.h"
#include "kernels/types.h"

namespace awqd::cuda {

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
