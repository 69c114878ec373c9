// Tracer: which calls are traced, and a thread that takes their spans away. Never in the way: what
// finds no room is dropped and counted.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "server/obs/call_record.h"

namespace awqd::obs {

// A span as OpenTelemetry has it.
struct Span {
  uint64_t trace_high = 0, trace_low = 0, id = 0, parent = 0;  // parent 0: none
  std::string name;
  bool server = false;  // the call itself; the others are its steps
  bool failed = false;
  absl::Time begin, end;
  std::vector<std::pair<absl::string_view, std::string>> texts;
  std::vector<std::pair<absl::string_view, int64_t>> numbers;
  std::vector<SpanRef> links;
};

// The call, then its steps.
std::vector<Span> SpansOf(const CallRecord& record);

// One object without a line feed, in the JSON that OTLP has for a span.
std::string SpanJson(const Span& span);

// Called on the tracer's thread alone; may wait.
class SpanExporter {
 public:
  virtual ~SpanExporter() = default;
  virtual absl::Status Export(const std::vector<Span>& spans) = 0;
};

// Appends a line for each span. The error names the file.
absl::StatusOr<std::unique_ptr<SpanExporter>> AppendSpansTo(const std::string& path);

class Tracer {
 public:
  static constexpr size_t kQueue = 4096;  // calls that wait to be exported

  // `share` of the calls that bring no traceparent are traced, from 0 to 1; those that bring one as
  // it says.
  Tracer(double share, std::unique_ptr<SpanExporter> exporter);
  // Exports what waits.
  ~Tracer();

  // Thread-safe, as all that follows. What the call at hand belongs to.
  TraceContext Begin(absl::string_view traceparent) const;
  void End(CallRecord record);

  int64_t exported_spans() const { return exported_.load(std::memory_order_relaxed); }
  // Without room in the queue, or not taken by the exporter.
  int64_t dropped_spans() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  void Run();
  void Export(const std::vector<CallRecord>& records);

  const double share_;
  const std::unique_ptr<SpanExporter> exporter_;
  std::atomic<int64_t> exported_{0}, dropped_{0};
  bool failing_ = false;  // of the thread: the last export failed, which was logged
  Mutex mu_;
  CondVar wake_;
  std::vector<CallRecord> queue_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace awqd::obs
