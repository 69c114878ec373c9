// The engine over one local device: scheduler in front, one lane per worker behind.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "server/engine/engine.h"

namespace awqd {

struct EngineOptions {
  // Fewer tokens: fused kernel; this many and more: dequantise, then a dense product.
  int64_t token_threshold = 256;
  // Requests that may wait; the next one is refused with RESOURCE_EXHAUSTED.
  int64_t max_queued_requests = 1024;
  // Payload bytes that may wait.
  int64_t max_queued_bytes = int64_t{512} << 20;
  // Streams with a worker thread each. 0: one on the CPU, whose kernels use all cores; two on a
  // GPU, so that the copies of one request overlap the kernels of another.
  int lanes = 0;
  // Called once, on a worker thread, when the device reports a sticky error and nothing can be
  // served any more.
  std::function<void(const absl::Status&)> on_device_fault;
};

// `device` outlives the engine.
absl::StatusOr<std::unique_ptr<Engine>> MakeLocalEngine(Device* device,
                                                        const EngineOptions& options);

}  // namespace awqd
