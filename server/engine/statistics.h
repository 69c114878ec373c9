// Statistics of what one device has computed, batch by batch.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/histogram.h"
#include "kernels/base/mutex.h"
#include "server/engine/work.h"
#include "server/obs/snapshot.h"

namespace awqd::engine {

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
  void FillStats(obs::DeviceStats* out) const;

 private:
  // Works run few different lists of kernel rows. Lists past this number, which no table of rows
  // comes near, count as "other".
  static constexpr size_t kMaxKernels = 256;

  Histogram batch_tokens_{kCountBounds};
  Histogram batch_requests_{kCountBounds};
  Histogram compute_ns_{kLatencyBounds};
  Histogram queue_ns_{kLatencyBounds};
  mutable Mutex mu_;
  int64_t batches_failed_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t merged_requests_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, obs::KernelStats, std::less<>> kernels_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::engine
