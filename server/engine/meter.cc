// One lock a batch, which costs less than a thousandth of the shortest.
#include "server/engine/meter.h"

namespace awqd::engine {
namespace {

// Columns of a weight that is cut run on every device: one of them counts for the request.
bool CountsForModel(const Work& work) {
  return !work.weights().empty() && work.weights().front()->use != nullptr &&
         (work.part == 0 || !work.weights().front()->cut());
}

}  // namespace

void Meter::Count(const batching::Batch& batch, absl::Time start, const absl::Status& status,
                  const ExecutionReport& report) {
  const auto requests = static_cast<int64_t>(batch.tasks.size());
  batch_tokens_.Observe(batch.tokens);
  batch_requests_.Observe(requests);
  compute_ns_.Observe(report.compute_us * 1000);
  for (const auto& task : batch.tasks) {
    const auto& work = static_cast<const Work&>(*task);
    const int64_t queue_ns = absl::ToInt64Nanoseconds(start - work.enqueued);
    queue_ns_.Observe(queue_ns);
    if (!CountsForModel(work)) continue;
    model::ModelUse& use = *work.weights().front()->use;
    constexpr auto kOrder = std::memory_order_relaxed;
    (status.ok() ? use.requests : use.failed).fetch_add(1, kOrder);
    use.tokens.fetch_add(work.tokens(), kOrder);
    use.queue_ns.fetch_add(queue_ns, kOrder);
  }
  MutexLock lock(&mu_);
  if (!status.ok()) ++batches_failed_;
  if (requests > 1) merged_requests_ += requests;
  if (report.kernel.empty()) return;
  auto it = kernels_.find(report.kernel);
  if (it == kernels_.end()) {
    const std::string name = kernels_.size() < kMaxKernels ? report.kernel : "other";
    it = kernels_.emplace(name, KernelUse{.kernel = name}).first;
  }
  ++it->second.batches;
  it->second.compute_us += report.compute_us;
}

void Meter::Fill(EngineStats* out) const {
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
