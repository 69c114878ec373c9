// Lane: one stream of a device with the buffers that a worker needs; used by one thread at a time.
//
// Buffers only grow, so that after warm-up the request path allocates nothing on the device and
// nothing pinned.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "kernels/kernels.h"
#include "server/engine/engine.h"

namespace awqd {

class Lane {
 public:
  static absl::StatusOr<std::unique_ptr<Lane>> Create(Device* device);

  // Runs the work and waits for it. `out` becomes tokens x N of out_dtype.
  absl::Status Matmul(const MatmulWork& work, Path path, std::string* out, const KernelRow** ran);
  // `out` becomes rows x cols of out_dtype.
  absl::Status Dequantize(const DequantizeWork& work, std::string* out, const KernelRow** ran);

 private:
  Lane(Device* device, std::unique_ptr<Stream> stream);

  // A buffer that only grows.
  class Scratch {
   public:
    // At least `bytes` long; contents undefined. RESOURCE_EXHAUSTED when the device has no room.
    absl::StatusOr<void*> Get(Device* device, MemoryKind kind, int64_t bytes);

   private:
    Buffer buffer_;
  };

  // The bytes in device memory: as they are when the device reads host memory, else through
  // staging.
  absl::StatusOr<const void*> Upload(const void* host, int64_t bytes, Scratch* staging,
                                     Scratch* device);
  // Runs `launch` with a device destination of `bytes` and brings the result into `out`.
  template <typename Launch>
  absl::Status RunInto(std::string* out, int64_t bytes, Launch launch);

  Device* const device_;
  const std::unique_ptr<Stream> stream_;
  Scratch x_staging_, x_device_;
  Scratch bias_staging_, bias_device_;
  Scratch y_staging_, y_device_;
  Scratch workspace_;
};

}  // namespace awqd
