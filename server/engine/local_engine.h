// The engine of one device: a scheduler, and a lane for each of its workers; and its options.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "server/batching/batch_queue.h"
#include "server/engine/engine.h"
#include "server/engine/threshold_table.h"

namespace awqd::engine {

struct EngineOptions {
  // Fewer merged tokens: fused kernel; this many and more: dequantise, then a dense product.
  // A count, ThresholdTable::kByKernel or kAuto.
  int64_t token_threshold = ThresholdTable::kByKernel;
  batching::BatchOptions batching;
  // Streams with a worker thread each. 0: one on the CPU, whose kernels use all cores; two on a
  // GPU, so that the copies of one batch overlap the kernels of another.
  int lanes = 0;
  // Threads that help lanes to answer large batches. -1: a quarter of the cores, at most four, on a
  // GPU; none on the CPU, whose kernels use the cores.
  int answer_threads = -1;
  // Host memory for payloads and results that is kept for reuse between requests.
  int64_t staging_bytes = int64_t{512} << 20;
  // Called once, on a worker thread, when the device reports a sticky error and nothing on it
  // can be served any more.
  std::function<void(const absl::Status&)> on_device_fault;
};

// `device` outlives the engine.
absl::StatusOr<std::unique_ptr<Engine>> MakeLocalEngine(Device* device,
                                                        const EngineOptions& options);

}  // namespace awqd::engine
