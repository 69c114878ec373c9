// Makes a recorder of calls from options.
#include "server/call_recorder.h"

#include <utility>

#include "kernels/base/status.h"
#include "server/model/model_folders.h"
#include "server/otlp/otlp_exporter.h"

namespace awqd {
namespace {

absl::StatusOr<std::unique_ptr<obs::Tracer>> MakeTracer(const TraceOptions& options) {
  std::unique_ptr<obs::SpanExporter> exporter;
  if (!options.otlp_endpoint.empty()) {
    exporter = otlp::MakeOtlpExporter(options.otlp_endpoint, AWQD_VERSION);
  } else if (!options.file.empty()) {
    absl::StatusOr<std::unique_ptr<obs::SpanExporter>> file = obs::OpenSpanFile(options.file);
    if (!file.ok()) return model::Prefixed("--trace_file", file.status());
    exporter = *std::move(file);
  } else {
    return std::unique_ptr<obs::Tracer>();
  }
  return std::make_unique<obs::Tracer>(options.sample, std::move(exporter));
}

}  // namespace

absl::StatusOr<std::unique_ptr<obs::CallRecorder>> MakeCallRecorder(const Options& options) {
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<obs::Tracer> tracer, MakeTracer(options.trace));
  if (tracer == nullptr && options.access_log.mode == obs::AccessLogMode::kOff) {
    return std::unique_ptr<obs::CallRecorder>();
  }
  obs::WantRequests();
  return std::make_unique<obs::CallRecorder>(options.access_log, std::move(tracer));
}

}  // namespace awqd
