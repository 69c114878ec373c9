// One lock a batch, which costs less than a thousandth of the shortest.
#include "server/engine/statistics.h"

#include <algorithm>

namespace awqd::engine {
namespace {

// A request on a partitioned weight runs on every device; one of them counts it.
bool CountsForModel(const Work& work) {
  return !work.weights().empty() && work.weights().front()->statistics != nullptr &&
         (work.part == 0 || !work.weights().front()->partitioned());
}

// As the inference protocols count: each request has the times of its whole batch.
void RecordModelBatch(const batching::Batch& batch, const ExecutionReport& report,
                      model::ModelStatistics& use) {
  constexpr auto kOrder = std::memory_order_relaxed;
  const auto requests = static_cast<int64_t>(batch.tasks.size());
  const int64_t compute_ns = std::max<int64_t>(0, report.compute_us * 1000 - report.input_ns);
  use.batches.fetch_add(1, kOrder);
  use.input_ns.fetch_add(requests * report.input_ns, kOrder);
  use.compute_ns.fetch_add(requests * compute_ns, kOrder);
  use.sizes.AddComputed(batch.tokens, report.input_ns, compute_ns);
}

}  // namespace

std::shared_ptr<model::ModelStatistics> StatisticsRecorder::FindModelStatistics(
    const batching::Batch& batch) {
  const auto& work = static_cast<const Work&>(*batch.tasks.front());
  return CountsForModel(work) ? work.weights().front()->statistics : nullptr;
}

void StatisticsRecorder::RecordAnswers(model::ModelStatistics& model, int64_t requests,
                                       int64_t tokens, absl::Duration took) {
  const int64_t ns = absl::ToInt64Nanoseconds(took);
  model.answered.fetch_add(requests, std::memory_order_relaxed);
  model.output_ns.fetch_add(requests * ns, std::memory_order_relaxed);
  model.sizes.AddAnswered(tokens, ns);
}

void StatisticsRecorder::RecordBatch(const batching::Batch& batch, absl::Time start,
                                     const absl::Status& status, const ExecutionReport& report) {
  const auto requests = static_cast<int64_t>(batch.tasks.size());
  batch_tokens_.Observe(batch.tokens);
  batch_requests_.Observe(requests);
  compute_ns_.Observe(report.compute_us * 1000);
  for (const auto& task : batch.tasks) {
    const auto& work = static_cast<const Work&>(*task);
    const int64_t queue_ns = absl::ToInt64Nanoseconds(start - work.enqueued);
    queue_ns_.Observe(queue_ns);
    if (!CountsForModel(work)) continue;
    model::ModelStatistics& use = *work.weights().front()->statistics;
    constexpr auto kOrder = std::memory_order_relaxed;
    (status.ok() ? use.requests : use.failed).fetch_add(1, kOrder);
    use.tokens.fetch_add(work.tokens(), kOrder);
    use.queue_ns.fetch_add(queue_ns, kOrder);
  }
  if (const std::shared_ptr<model::ModelStatistics> use = FindModelStatistics(batch);
      use != nullptr && status.ok()) {
    RecordModelBatch(batch, report, *use);
  }
  MutexLock lock(&mu_);
  if (!status.ok()) ++batches_failed_;
  if (requests > 1) merged_requests_ += requests;
  if (report.kernel.empty()) return;
  auto it = kernels_.find(report.kernel);
  if (it == kernels_.end()) {
    const std::string name = kernels_.size() < kMaxKernels ? report.kernel : "other";
    it = kernels_.emplace(name, obs::KernelStats{.kernel = name}).first;
  }
  ++it->second.batches;
  it->second.compute += absl::Microseconds(report.compute_us);
}

void StatisticsRecorder::FillStats(obs::DeviceStats* out) const {
  out->batch_tokens = batch_tokens_.data();
  out->batch_requests = batch_requests_.data();
  out->compute_ns = compute_ns_.data();
  out->queue_ns = queue_ns_.data();
  MutexLock lock(&mu_);
  out->batches_failed = batches_failed_;
  out->merged_requests = merged_requests_;
  for (const auto& [name, use] : kernels_) out->kernels.push_back(use);
}

}  // namespace awqd::engine
