// Statistics of what one device has computed, batch by batch.
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

// The batches that ran one list of kernel rows.
struct KernelStatistics {
  std::string kernel;  // "a,b" as in ExecutionReport: rows that ran one after the other
  int64_t batches = 0;
  int64_t compute_us = 0;
};

// The statistics of one device.
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
  std::vector<KernelStatistics> kernels;
};

// Thread-safe.
class StatisticsRecorder {
 public:
  // Counts a batch that has run from `start` on; its tasks are still there.
  void RecordBatch(const batching::Batch& batch, absl::Time start, const absl::Status& status,
                   const ExecutionReport& report);
  // Counts the answers to a batch, which took `took`. `model`: as FindModelStatistics returned it
  // for the batch.
  static void RecordAnswers(model::ModelStatistics& model, int64_t requests, int64_t tokens,
                            absl::Duration took);
  // The statistics of the model whose works these are; null for works of no model.
  static std::shared_ptr<model::ModelStatistics> FindModelStatistics(const batching::Batch& batch);
  // Fills all fields that RecordBatch counts.
  void FillStats(EngineStats* out) const;

 private:
  // Works run few different lists of kernel rows. Lists past this number, which no table of rows
  // comes near, count as "other".
  static constexpr size_t kMaxKernels = 256;

  obs::Histogram batch_tokens_{obs::kCountBounds};
  obs::Histogram batch_requests_{obs::kCountBounds};
  obs::Histogram compute_ns_{obs::kLatencyBounds};
  obs::Histogram queue_ns_{obs::kLatencyBounds};
  mutable Mutex mu_;
  int64_t batches_failed_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t merged_requests_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, KernelStatistics, std::less<>> kernels_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::engine
