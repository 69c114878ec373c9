// Lane: one stream of a device with the buffers that a worker needs; used by one thread at a time.
//
// Buffers only grow while there is work, so that after warm-up the request path allocates nothing
// on the device and nothing pinned.
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

// Rows of one request within a batch: x [tokens, K] in staging memory.
struct RowPiece {
  const char* x = nullptr;
  int64_t tokens = 0;
};

class Lane {
 public:
  // `staging`, whose copies are counted, outlives the lane.
  static absl::StatusOr<std::unique_ptr<Lane>> Create(Device* device, StagingPool* staging);

  // Concatenates the pieces' rows and multiplies once; waits for it. `y`: staging memory for
  // [tokens of all pieces, N]. Weight, dtypes and bias are those of `work`, whose own rows are not
  // looked at.
  absl::Status Matmul(const MatmulWork& work, absl::Span<const RowPiece> pieces, Path path, char* y,
                      const KernelRow** ran);

  // `out`: staging memory for rows x cols of out_dtype.
  absl::Status Dequantize(const DequantizeWork& work, char* out, const KernelRow** ran);

  // Frees buffers in host memory; the next work allocates them again. A device's own stay: warm-up
  // brought them to their final size.
  void FreeHostBuffers();

 private:
  Lane(Device* device, StagingPool* staging, std::unique_ptr<Stream> stream);

  // A buffer that only grows.
  class Scratch {
   public:
    // At least `bytes` long; contents undefined. RESOURCE_EXHAUSTED when the device has no room.
    absl::StatusOr<char*> Get(Device* device, MemoryKind kind, int64_t bytes);
    void Free() { buffer_.Reset(); }

   private:
    Buffer buffer_;
  };

  // Where kernels read the request's own bias.
  absl::StatusOr<const float*> Bias(const std::vector<float>& bias);
  // The pieces' rows one after the other, where kernels can read them. `row_bytes`: of one row of
  // x.
  absl::StatusOr<const void*> Gather(absl::Span<const RowPiece> pieces, int64_t row_bytes);
  // Gather for a device out of the host's reach: large pieces are copied there from where they lie,
  // runs of small ones are put together first.
  absl::Status Upload(absl::Span<const RowPiece> pieces, int64_t row_bytes, char* target);
  // Copies rows one after the other on the host; returns their end.
  char* Concatenate(absl::Span<const RowPiece> pieces, int64_t row_bytes, char* target);
  // Where kernels write `bytes` of results that end up at `host`.
  absl::StatusOr<char*> Target(char* host, int64_t bytes);
  // Brings the results to `host` and waits for the stream.
  absl::Status Fetch(char* host, const char* target, int64_t bytes);

  Device* const device_;
  StagingPool* const staging_;
  const bool direct_;  // kernels reach host memory
  const std::unique_ptr<Stream> stream_;
  Scratch x_staging_, x_device_;
  Scratch bias_staging_, bias_device_;
  Scratch y_device_;
  Scratch workspace_;
};

}  // namespace awqd
