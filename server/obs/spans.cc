// A call's spans, and how they are written to a file.
#include <fstream>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/obs/logging.h"
#include "server/obs/tracer.h"

namespace awqd::obs {
namespace {

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

// What a call was computed together with.
void AddBatch(const CallRecord& record, Span* out) {
  const BatchNote& batch = record.sum.batch;
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

std::vector<Span> SpansOf(const CallRecord& record) {
  std::vector<Span> out = {CallSpan(record)};
  for (const CallStep& step : StepsOf(record)) {
    out.push_back({.trace_high = record.trace.trace_high,
                   .trace_low = record.trace.trace_low,
                   .id = RandomId(),
                   .parent = record.trace.span,
                   .name = std::string(step.name),
                   .begin = step.begin,
                   .end = step.end});
    if (step.name == "compute") AddBatch(record, &out.back());
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

absl::StatusOr<std::unique_ptr<SpanExporter>> AppendSpansTo(const std::string& path) {
  auto exporter = std::make_unique<FileExporter>(path);
  if (!exporter->open()) {
    return absl::InvalidArgumentError(absl::StrCat("cannot write to \"", path, "\""));
  }
  return std::unique_ptr<SpanExporter>(std::move(exporter));
}

}  // namespace awqd::obs
