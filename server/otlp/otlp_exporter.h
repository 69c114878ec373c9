// Spans to a collector of OpenTelemetry (OTLP over gRPC).
#pragma once

#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "server/obs/tracer.h"

namespace awqd::otlp {

// `endpoint`: "host:port" or "unix:/path", in plaintext. Does not connect before the first spans.
// An export fails with the collector's status, with UNAVAILABLE when there is none, or with
// DEADLINE_EXCEEDED after five seconds.
std::unique_ptr<obs::SpanExporter> MakeOtlpExporter(const std::string& endpoint,
                                                    absl::string_view version);

}  // namespace awqd::otlp
