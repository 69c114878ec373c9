// Sampling, the queue, the thread.
#include "server/obs/tracer.h"

#include <chrono>

#include "server/obs/logging.h"

namespace awqd::obs {
namespace {

// Spans leave together: at most this long after their call.
constexpr std::chrono::milliseconds kEvery{1000};

}  // namespace

Tracer::Tracer(double share, std::unique_ptr<SpanExporter> exporter)
    : share_(share), exporter_(std::move(exporter)), thread_([this] { Run(); }) {}

Tracer::~Tracer() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  thread_.join();
}

TraceContext Tracer::Begin(absl::string_view traceparent) const {
  if (const TraceContext context = ContinueTrace(traceparent); context.valid()) return context;
  if (share_ <= 0) return {};
  // 53 bits, which a double holds exactly.
  const double drawn = static_cast<double>(RandomId() >> 11) / static_cast<double>(1ull << 53);
  return drawn < share_ ? NewTrace() : TraceContext();
}

void Tracer::End(CallRecord record) {
  {
    MutexLock lock(&mu_);
    if (queue_.size() < kQueue) {
      queue_.push_back(std::move(record));
      return;
    }
  }
  dropped_.fetch_add(static_cast<int64_t>(SpansOf(record).size()), std::memory_order_relaxed);
}

void Tracer::Export(const std::vector<CallRecord>& records) {
  std::vector<Span> spans;
  for (const CallRecord& record : records) {
    for (Span& span : SpansOf(record)) spans.push_back(std::move(span));
  }
  const absl::Status status = exporter_->Export(spans);
  (status.ok() ? exported_ : dropped_)
      .fetch_add(static_cast<int64_t>(spans.size()), std::memory_order_relaxed);
  if (!status.ok() && !failing_) {
    LogEvent(LogLevel::kWarning, "traces are dropped",
             {{"reason", LogText(status.message(), 1024)}});
  }
  if (status.ok() && failing_) LogEvent(LogLevel::kInfo, "traces are exported again", {});
  failing_ = !status.ok();
}

void Tracer::Run() {
  for (;;) {
    std::vector<CallRecord> records;
    bool last = false;
    {
      MutexLock lock(&mu_);
      const auto until = std::chrono::steady_clock::now() + kEvery;
      while (!stopping_ && std::chrono::steady_clock::now() < until) wake_.WaitUntil(&mu_, until);
      last = stopping_;
      records.swap(queue_);
    }
    if (!records.empty()) Export(records);
    if (last) return;
  }
}

}  // namespace awqd::obs
