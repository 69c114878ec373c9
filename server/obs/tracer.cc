// Makes the spans of calls, exports them to a file or another exporter, and samples calls.
#include "server/obs/tracer.h"

#include <fstream>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/obs/logging.h"

namespace awqd::obs {
namespace {

// The longest time that the spans of a call wait before they are exported.
constexpr absl::Duration kExportInterval = absl::Seconds(1);

Span CallSpan(const CallRecord& record) {
  const RequestSum& sum = record.sum;
  Span out = {.trace_high = record.trace.trace_high,
              .trace_low = record.trace.trace_low,
              .id = record.trace.span,
              .parent = record.trace.parent,
              .name = record.method,
              .server = true,
              .failed = record.code != absl::StatusCode::kOk,
              .begin = record.began,
              .end = record.ended};
  const size_t slash = record.method.rfind('/');
  out.texts = {{"rpc.system", "grpc"},
               {"rpc.service", record.method.substr(0, slash)},
               {"rpc.method", record.method.substr(slash + 1)},
               {"client.address", LogText(record.peer)}};
  const std::pair<absl::string_view, const std::string&> names[] = {
      {"enduser.id", record.identity},
      {"awqd.request_id", sum.request_id},
      {"awqd.model", sum.model},
      {"awqd.weight", sum.weight},
      {"awqd.kernel", sum.kernel}};
  for (const auto& [name, value] : names) {
    if (!value.empty()) out.texts.emplace_back(name, LogText(value));
  }
  out.numbers = {{"rpc.grpc.status_code", static_cast<int64_t>(record.code)},
                 {"awqd.requests", sum.requests},
                 {"awqd.tokens", sum.tokens},
                 {"awqd.batch_requests", sum.batch.requests},
                 {"awqd.received_bytes", record.received_bytes},
                 {"awqd.sent_bytes", record.sent_bytes}};
  return out;
}

// Annotates a compute span with its batch, and links it to the other traced calls of that batch.
void AnnotateBatch(const CallRecord& record, Span* out) {
  const BatchAnnotation& batch = record.sum.batch;
  out->numbers = {{"awqd.batch_id", batch.id},
                  {"awqd.batch_requests", batch.requests},
                  {"awqd.batch_tokens", batch.tokens}};
  if (batch.calls == nullptr) return;
  for (const SpanRef& call : *batch.calls) {
    if (call != record.trace.ref() && out->links.size() < kMaxLinks) out->links.push_back(call);
  }
}

class FileExporter final : public SpanExporter {
 public:
  explicit FileExporter(const std::string& path) : path_(path), file_(path, std::ios::app) {}
  bool open() const { return file_.is_open(); }

  absl::Status Export(const std::vector<Span>& spans) override {
    for (const Span& span : spans) file_ << SpanJson(span) << '\n';
    file_.flush();
    if (file_) return absl::OkStatus();
    file_.clear();  // the disk may have room again the next time
    return absl::UnavailableError(absl::StrCat("cannot write to \"", path_, "\""));
  }

 private:
  const std::string path_;
  std::ofstream file_;
};

}  // namespace

std::vector<Span> MakeSpans(const CallRecord& record) {
  std::vector<Span> out = {CallSpan(record)};
  for (const CallStep& step : ListSteps(record)) {
    out.push_back({.trace_high = record.trace.trace_high,
                   .trace_low = record.trace.trace_low,
                   .id = RandomId(),
                   .parent = record.trace.span,
                   .name = std::string(step.name),
                   .begin = step.begin,
                   .end = step.end});
    if (step.name == "compute") AnnotateBatch(record, &out.back());
  }
  return out;
}

std::string SpanJson(const Span& span) {
  // 64-bit numbers are strings in the JSON of Protocol Buffers.
  const auto time = [](absl::Time moment) { return absl::StrCat(absl::ToUnixNanos(moment)); };
  nlohmann::json attributes = nlohmann::json::array();
  for (const auto& [name, value] : span.texts) {
    attributes.push_back({{"key", std::string(name)}, {"value", {{"stringValue", value}}}});
  }
  for (const auto& [name, value] : span.numbers) {
    attributes.push_back(
        {{"key", std::string(name)}, {"value", {{"intValue", absl::StrCat(value)}}}});
  }
  nlohmann::json out = {{"traceId", HexId(span.trace_high) + HexId(span.trace_low)},
                        {"spanId", HexId(span.id)},
                        {"name", span.name},
                        {"kind", span.server ? 2 : 1},
                        {"startTimeUnixNano", time(span.begin)},
                        {"endTimeUnixNano", time(span.end)},
                        {"attributes", attributes}};
  for (const SpanRef& link : span.links) {
    out["links"].push_back(
        {{"traceId", HexId(link.trace_high) + HexId(link.trace_low)}, {"spanId", HexId(link.id)}});
  }
  if (span.parent != 0) out["parentSpanId"] = HexId(span.parent);
  if (span.failed) out["status"] = {{"code", 2}};
  return out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

absl::StatusOr<std::unique_ptr<SpanExporter>> OpenSpanFile(const std::string& path) {
  auto exporter = std::make_unique<FileExporter>(path);
  if (!exporter->open()) {
    return absl::InvalidArgumentError(absl::StrCat("cannot write to \"", path, "\""));
  }
  return std::unique_ptr<SpanExporter>(std::move(exporter));
}

Tracer::Tracer(double sample, std::unique_ptr<SpanExporter> exporter)
    : sample_(sample), exporter_(std::move(exporter)), thread_([this] { Run(); }) {}

Tracer::~Tracer() {
  pause_.End();
  thread_.join();
}

TraceContext Tracer::Begin(absl::string_view traceparent) const {
  if (const TraceContext context = ContinueTrace(traceparent); context.valid()) return context;
  if (sample_ <= 0) return {};
  // 53 bits, which a double holds exactly.
  const double drawn = static_cast<double>(RandomId() >> 11) / static_cast<double>(1ull << 53);
  return drawn < sample_ ? NewTrace() : TraceContext();
}

void Tracer::End(CallRecord record) {
  {
    MutexLock lock(&mu_);
    if (queue_.size() < kQueue) {
      queue_.push_back(std::move(record));
      return;
    }
  }
  dropped_.fetch_add(static_cast<int64_t>(MakeSpans(record).size()), std::memory_order_relaxed);
}

void Tracer::Export(const std::vector<CallRecord>& records) {
  std::vector<Span> spans;
  for (const CallRecord& record : records) {
    for (Span& span : MakeSpans(record)) spans.push_back(std::move(span));
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
  bool last = false;
  while (!last) {
    last = !pause_.WaitFor(kExportInterval);
    std::vector<CallRecord> records;
    {
      MutexLock lock(&mu_);
      records.swap(queue_);
    }
    if (!records.empty()) Export(records);
  }
}

}  // namespace awqd::obs
