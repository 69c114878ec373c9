// Spans to a collector of OpenTelemetry (OTLP over gRPC): where they go, what they say of the process
// that made them, and the exporter.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/obs/tracer.h"

namespace awqd::otlp {

// The value of a variable of the environment; empty when it is not set.
using Environment = std::function<std::string(const char* name)>;
std::string ReadEnvironment(const char* name);

struct OtlpOptions {
  using Pairs = std::vector<std::pair<std::string, std::string>>;

  std::string target;     // as gRPC names it: "host:port" or "unix:/path"
  bool loopback = false;  // the target is on this machine
  bool tls = false;
  std::string ca, certificate, key;  // contents of PEM files; no `ca`: the system's
  Pairs headers;                     // legal metadata of gRPC
  Pairs resource;                    // attributes; the first one is service.name
  bool gzip = false;
  absl::Duration timeout = absl::Seconds(5);  // of an export
};

// INVALID_ARGUMENT unless ReadOtlpOptions takes the endpoint; the caller names the flag.
absl::Status CheckOtlpEndpoint(const std::string& endpoint);

// Reads `endpoint` and the variables of OpenTelemetry: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
// and OTEL_EXPORTER_OTLP_ with HEADERS, CERTIFICATE, CLIENT_CERTIFICATE, CLIENT_KEY, INSECURE,
// COMPRESSION and TIMEOUT, or with TRACES_ before these.
//
// `endpoint`: "host:port" or "http://host:port" in plaintext, "https://host:port" with TLS, or
// "unix:/path". A URL without a port means 4317. INVALID_ARGUMENT names an endpoint or a file that
// cannot be used. Entries of lists that are not key=value are left out, and the log says so.
absl::StatusOr<OtlpOptions> ReadOtlpOptions(const std::string& endpoint, absl::string_view version,
                                            const Environment& environment = ReadEnvironment);

// The endpoint that OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT names. Empty
// when there is none, or when OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER or OTEL_EXPORTER_OTLP_PROTOCOL
// asks for something else than OTLP over gRPC.
std::string EndpointOfEnvironment(const Environment& environment = ReadEnvironment);

// The fraction of calls to trace by OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG; 0 without them.
double SampleOfEnvironment(const Environment& environment = ReadEnvironment);

// Does not connect before the first spans. An export fails with the collector's status, with
// UNAVAILABLE when there is none, or with DEADLINE_EXCEEDED after OtlpOptions::timeout. A proxy of
// the environment (http_proxy) is not used for a target on this machine.
std::unique_ptr<obs::SpanExporter> MakeOtlpExporter(const OtlpOptions& options);

}  // namespace awqd::otlp
