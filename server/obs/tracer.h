// Tracer: samples calls and exports their spans on a thread of its own. Calls never wait for it:
// spans that find no room in its queue are dropped and counted.
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
#include "kernels/base/pause.h"
#include "server/obs/call_record.h"

namespace awqd::obs {

// A span of OpenTelemetry.
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

// The call's span, then the spans of its steps.
std::vector<Span> MakeSpans(const CallRecord& record);

// A span as one line of OTLP's JSON, without the line feed.
std::string SpanJson(const Span& span);

// Called by the tracer's thread alone; may wait.
class SpanExporter {
 public:
  virtual ~SpanExporter() = default;
  virtual absl::Status Export(const std::vector<Span>& spans) = 0;
};

// An exporter that appends a line of JSON for each span to a file. INVALID_ARGUMENT names a file
// that cannot be opened.
absl::StatusOr<std::unique_ptr<SpanExporter>> OpenSpanFile(const std::string& path);

class Tracer {
 public:
  static constexpr size_t kQueue = 4096;  // calls that may wait to be exported

  // `sample`: the fraction of the calls without a traceparent that are traced, from 0 to 1. A call
  // with a traceparent is traced if the header says so.
  Tracer(double sample, std::unique_ptr<SpanExporter> exporter);
  // Exports the calls that wait.
  ~Tracer();

  // The trace of a call that begins. Thread-safe, as all functions below.
  TraceContext Begin(absl::string_view traceparent) const;
  void End(CallRecord record);

  int64_t exported_spans() const { return exported_.load(std::memory_order_relaxed); }
  // Spans that found no room in the queue, or that the exporter failed to export.
  int64_t dropped_spans() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  void Run();
  void Export(const std::vector<CallRecord>& records);

  const double sample_;
  const std::unique_ptr<SpanExporter> exporter_;
  std::atomic<int64_t> exported_{0}, dropped_{0};
  bool failing_ = false;  // the last export failed, which was logged; used by the thread alone
  Mutex mu_;
  std::vector<CallRecord> queue_ ABSL_GUARDED_BY(mu_);
  Pause pause_;
  std::thread thread_;
};

}  // namespace awqd::obs
