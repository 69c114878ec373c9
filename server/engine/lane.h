// Lane: one stream of a device with the buffers that a worker needs; used by one thread at a time.
//
// Buffers only grow, so that after warm-up the request path allocates nothing on the device and
// nothing pinned.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/kernels.h"
#include "server/engine/engine.h"

namespace awqd {

// Rows of one request within a batch: x [tokens, K] in, y [tokens, N] out, both in host memory.
struct RowPiece {
  const char* x = nullptr;
  char* y = nullptr;
  int64_t tokens = 0;
};

class Lane {
 public:
  static absl::StatusOr<std::unique_ptr<Lane>> Create(Device* device);

  // Concatenates the pieces' rows, multiplies once, and splits the result; waits for it. Weight,
  // dtypes and bias are those of `work`, whose own rows are not looked at.
  absl::Status Matmul(const MatmulWork& work, absl::Span<const RowPiece> pieces, Path path,
                      const KernelRow** ran);

  // `out`: host memory for rows x cols of out_dtype.
  absl::Status Dequantize(const DequantizeWork& work, char* out, const KernelRow** ran);

 private:
  Lane(Device* device, std::unique_ptr<Stream> stream);

  // A buffer that only grows.
  class Scratch {
   public:
    // At least `bytes` long; contents undefined. RESOURCE_EXHAUSTED when the device has no room.
    absl::StatusOr<char*> Get(Device* device, MemoryKind kind, int64_t bytes);

   private:
    Buffer buffer_;
  };

  // Where kernels read `bytes` of host memory: in place when they can, else copied through
  // `staging`.
  absl::StatusOr<const void*> Upload(const void* host, int64_t bytes, Scratch* staging,
                                     Scratch* device);
  // The pieces' rows one after the other, where kernels can read them. `row_bytes`: of one row of
  // x.
  absl::StatusOr<const void*> Gather(absl::Span<const RowPiece> pieces, int64_t row_bytes);
  // Where kernels write `bytes` of results: `direct` when the device reaches it and it is whole.
  absl::StatusOr<char*> Target(char* direct, int64_t bytes);
  // Waits for the stream and hands rows of `row_bytes` at `target` to the pieces.
  absl::Status Scatter(const char* target, absl::Span<const RowPiece> pieces, int64_t row_bytes);

  Device* const device_;
  const bool direct_;  // kernels reach host memory
  const std::unique_ptr<Stream> stream_;
  Scratch x_staging_, x_device_;
  Scratch bias_staging_, bias_device_;
  Scratch y_staging_, y_device_;
  Scratch workspace_;
};

}  // namespace awqd
