// Meter: what one device has computed so far, batch by batch.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "kernels/device.h"
#include "server/batching/batch_scheduler.h"
#include "server/engine/staging.h"
#include "server/engine/work.h"
#include "server/obs/histogram.h"

namespace awqd::engine {

// The batches that ran the same kernel rows.
struct KernelUse {
  std::string kernel;  // "a,b" as in ExecutionReport: rows that ran one after the other
  int64_t batches = 0;
  int64_t compute_us = 0;
};

// Of one device.
struct EngineStats {
  const Device* device = nullptr;
  int64_t queued_tasks = 0;
  batching::SchedulerCounts queue;
  StagingStats staging;
  int64_t batches_failed = 0;
  int64_t merged_requests = 0;        // that shared their batch with others
  obs::HistogramData batch_tokens;    // of each batch
  obs::HistogramData batch_requests;  // of each batch
  obs::HistogramData compute_ns;      // of each batch
  obs::HistogramData queue_ns;        // of each request
  std::vector<KernelUse> kernels;
};

// Thread-safe.
class Meter {
 public:
  // A batch has run from `start` on, and its tasks are still there.
  void Count(const batching::Batch& batch, absl::Time start, const absl::Status& status,
             const ExecutionReport& report);
  // The answers to that batch were given, which took so long. `use` as UseOf told of it before.
  static void CountAnswers(model::ModelStatistics& use, int64_t requests, int64_t tokens,
                           absl::Duration took);
  // Where the batch counts for a model; null: nowhere. All its works are of one model.
  static std::shared_ptr<model::ModelStatistics> UseOf(const batching::Batch& batch);
  // Fills what Count counts.
  void Fill(EngineStats* out) const;

 private:
  // There are as many as the kernel rows that a work runs one after the other make lists: a few.
  // Past this, which no table of rows comes near, all others count as "other".
  static constexpr size_t kMaxKernels = 256;

  obs::Histogram batch_tokens_{obs::kCountBounds};
  obs::Histogram batch_requests_{obs::kCountBounds};
  obs::Histogram compute_ns_{obs::kLatencyBounds};
  obs::Histogram queue_ns_{obs::kLatencyBounds};
  mutable Mutex mu_;
  int64_t batches_failed_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t merged_requests_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, KernelUse, std::less<>> kernels_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::engine
