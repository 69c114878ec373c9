// Reads endpoints and the variables of OpenTelemetry; one unary call for each export.
#include "server/otlp/otlp_exporter.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "grpc/compression.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/impl/client_unary_call.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/impl/rpc_method.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "kernels/base/status.h"
#include "otlp/trace.pb.h"
#include "server/obs/logging.h"

namespace awqd::otlp {
namespace {

using Pairs = OtlpOptions::Pairs;

constexpr int kDefaultPort = 4317;

// A variable of the exporter: that for traces, or that for all signals.
std::string ReadVariable(const Environment& environment, const std::string& name) {
  const std::string own = environment(("OTEL_EXPORTER_OTLP_TRACES_" + name).c_str());
  return own.empty() ? environment(("OTEL_EXPORTER_OTLP_" + name).c_str()) : own;
}

// "%2C" -> ",". Leaves a percent sign that no two digits follow.
std::string DecodePercents(absl::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    uint32_t byte = 0;
    if (text[i] == '%' && i + 2 < text.size() && absl::ascii_isxdigit(text[i + 1]) &&
        absl::ascii_isxdigit(text[i + 2]) && absl::SimpleHexAtoi(text.substr(i + 1, 2), &byte)) {
      out += static_cast<char>(byte);
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

// "key=value,key=value", with values in percent-encoding, as W3C's header baggage has it.
Pairs ParsePairs(const char* variable, absl::string_view text,
                 const std::function<bool(absl::string_view key, absl::string_view value)>& legal) {
  Pairs out;
  for (const absl::string_view entry : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(entry, absl::MaxSplits('=', 1));
    std::string key(absl::StripAsciiWhitespace(parts.first));
    std::string value = DecodePercents(absl::StripAsciiWhitespace(parts.second));
    if (!key.empty() && absl::StrContains(entry, '=') && legal(key, value)) {
      out.emplace_back(std::move(key), std::move(value));
    } else {  // the value may be a secret
      obs::LogEvent(obs::LogLevel::kWarning, "an entry is left out: it is not key=value",
                    {{"variable", variable}, {"key", obs::LogText(key)}});
    }
  }
  return out;
}

// gRPC ends the process over a call with metadata that is not legal.
bool IsLegalHeader(absl::string_view key, absl::string_view value) {
  const auto in_key = [](unsigned char c) {
    return absl::ascii_isdigit(c) || absl::ascii_islower(c) || c == '-' || c == '_' || c == '.';
  };
  return absl::c_all_of(key, in_key) && !absl::EndsWith(key, "-bin") &&
         !absl::StartsWith(key, "grpc-") && absl::c_all_of(value, absl::ascii_isprint);
}

void SetAttribute(Pairs* out, const std::string& key, std::string value) {
  const auto it = absl::c_find_if(*out, [&](const auto& pair) { return pair.first == key; });
  if (it == out->end()) {
    out->emplace_back(key, std::move(value));
  } else {
    it->second = std::move(value);
  }
}

// A random UUID: replicas that share everything else differ in it.
std::string MakeInstanceId() {
  const uint64_t high = obs::RandomId(), low = obs::RandomId();
  return absl::StrFormat("%08x-%04x-4%03x-%04x-%012x", high >> 32, (high >> 16) & 0xffff,
                         high & 0xfff, 0x8000 | ((low >> 48) & 0x3fff), low & 0xffffffffffff);
}

Pairs ReadResource(absl::string_view version, const Environment& environment) {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  Pairs out = {{"service.name", "awqd"},
               {"service.version", std::string(version)},
               {"service.instance.id", MakeInstanceId()},
               {"host.name", host}};
  constexpr char kVariable[] = "OTEL_RESOURCE_ATTRIBUTES";
  for (auto& [key, value] :
       ParsePairs(kVariable, environment(kVariable), [](auto...) { return true; })) {
    SetAttribute(&out, key, std::move(value));
  }
  const std::string name = environment("OTEL_SERVICE_NAME");
  if (!name.empty()) SetAttribute(&out, "service.name", name);
  return out;
}

bool IsLoopback(absl::string_view target) {
  if (absl::StartsWith(target, "unix:")) return true;
  for (const absl::string_view scheme : {"dns:///", "ipv4:", "ipv6:"}) {
    absl::ConsumePrefix(&target, scheme);
  }
  return absl::StartsWith(target, "127.") || absl::StartsWith(target, "[::1]:") ||
         absl::StartsWithIgnoreCase(target, "localhost:");
}

absl::Status BadEndpoint(const std::string& endpoint) {
  return Invalid("got \"", obs::LogText(endpoint),
                 "\", expected host:port, http://host:port, https://host:port or unix:/path");
}

bool HasPort(absl::string_view authority) {
  int port = 0;
  const size_t colon = authority.rfind(':');
  return colon != authority.npos && colon > 0 &&
         absl::SimpleAtoi(authority.substr(colon + 1), &port) && port > 0 && port <= 65535;
}

// Sets target, loopback and tls.
absl::Status ParseEndpoint(const std::string& endpoint, OtlpOptions* out) {
  absl::string_view rest = endpoint;
  out->tls = absl::ConsumePrefix(&rest, "https://");
  if (out->tls || absl::ConsumePrefix(&rest, "http://")) {
    // OTLP over gRPC has no path; that of a URL for HTTP is "/v1/traces".
    const absl::string_view authority = rest.substr(0, rest.find('/'));
    const size_t bracket = authority.rfind(']');
    const bool has_colon =
        authority.find(':', bracket == authority.npos ? 0 : bracket) != authority.npos;
    out->target = has_colon ? std::string(authority) : absl::StrCat(authority, ":", kDefaultPort);
  } else {
    out->target = endpoint;
  }
  const bool named =
      absl::StartsWith(out->target, "unix:") || absl::StartsWith(out->target, "dns:");
  if (!named && (absl::StrContains(out->target, '/') || !HasPort(out->target))) {
    return BadEndpoint(endpoint);
  }
  out->loopback = IsLoopback(out->target);
  return absl::OkStatus();
}

absl::Status ReadPem(const Environment& environment, const std::string& name, std::string* out) {
  const std::string path = ReadVariable(environment, name);
  if (path.empty()) return absl::OkStatus();
  std::ifstream file(path, std::ios::binary);
  out->assign(std::istreambuf_iterator<char>(file), {});
  if (absl::StrContains(*out, "-----BEGIN ")) return absl::OkStatus();
  return BadValue("OTEL_EXPORTER_OTLP_" + name, absl::StrCat("\"", obs::LogText(path), "\""),
                  "a file in PEM that can be read");
}

using ::otlp::ExportTraceRequest;
using ::otlp::ExportTraceResponse;

constexpr char kMethod[] = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

// Big-endian, as trace contexts are read.
std::string Bytes(uint64_t id) {
  std::string out(8, '\0');
  for (int i = 0; i < 8; ++i) out[i] = static_cast<char>(id >> (56 - 8 * i));
  return out;
}

void AddText(const std::string& key, const std::string& text,
             google::protobuf::RepeatedPtrField<::otlp::KeyValue>* out) {
  ::otlp::KeyValue* const attribute = out->Add();
  attribute->set_key(key);
  attribute->mutable_value()->set_string_value(text);
}

void Fill(const obs::Span& span, ::otlp::Span* out) {
  out->set_trace_id(Bytes(span.trace_high) + Bytes(span.trace_low));
  out->set_span_id(Bytes(span.id));
  if (span.parent != 0) out->set_parent_span_id(Bytes(span.parent));
  out->set_name(span.name);
  out->set_kind(span.server ? 2 : 1);
  out->set_start_time_unix_nano(static_cast<uint64_t>(absl::ToUnixNanos(span.begin)));
  out->set_end_time_unix_nano(static_cast<uint64_t>(absl::ToUnixNanos(span.end)));
  for (const auto& [name, value] : span.texts) {
    AddText(std::string(name), value, out->mutable_attributes());
  }
  for (const auto& [name, value] : span.numbers) {
    ::otlp::KeyValue* attribute = out->add_attributes();
    attribute->set_key(std::string(name));
    attribute->mutable_value()->set_int_value(value);
  }
  for (const obs::SpanRef& link : span.links) {
    ::otlp::Link* linked = out->add_links();
    linked->set_trace_id(Bytes(link.trace_high) + Bytes(link.trace_low));
    linked->set_span_id(Bytes(link.id));
  }
  if (span.failed) out->mutable_status()->set_code(2);
}

std::shared_ptr<grpc::Channel> MakeChannel(const OtlpOptions& options) {
  grpc::ChannelArguments arguments;
  if (options.loopback) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (options.gzip) arguments.SetCompressionAlgorithm(GRPC_COMPRESS_GZIP);
  return grpc::CreateCustomChannel(
      options.target,
      options.tls ? grpc::SslCredentials({options.ca, options.key, options.certificate})
                  : grpc::InsecureChannelCredentials(),
      arguments);
}

class OtlpExporter final : public obs::SpanExporter {
 public:
  explicit OtlpExporter(const OtlpOptions& options)
      : options_(options), channel_(MakeChannel(options)) {}

  absl::Status Export(const std::vector<obs::Span>& spans) override {
    ExportTraceRequest request;
    ::otlp::ResourceSpans* resource = request.add_resource_spans();
    auto* const attributes = resource->mutable_resource()->mutable_attributes();
    for (const auto& [key, value] : options_.resource) AddText(key, value, attributes);
    ::otlp::ScopeSpans* scope = resource->add_scope_spans();
    scope->mutable_scope()->set_name("awqd");
    for (const obs::Span& span : spans) Fill(span, scope->add_spans());
    return Send(request);
  }

 private:
  absl::Status Send(const ExportTraceRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + options_.timeout));
    for (const auto& [key, value] : options_.headers) context.AddMetadata(key, value);
    ExportTraceResponse response;
    const grpc::internal::RpcMethod method(kMethod, grpc::internal::RpcMethod::NORMAL_RPC);
    const grpc::Status status =
        grpc::internal::BlockingUnaryCall(channel_.get(), method, &context, request, &response);
    if (!status.ok()) {
      return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                          absl::StrCat("otlp_endpoint: ", status.error_message()));
    }
    if (response.partial_success().rejected_spans() > 0) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "otlp_endpoint: the collector took ", response.partial_success().rejected_spans(),
          " spans less than it got: ", response.partial_success().error_message()));
    }
    return absl::OkStatus();
  }

  const OtlpOptions options_;
  const std::shared_ptr<grpc::Channel> channel_;
};

}  // namespace

absl::Status CheckOtlpEndpoint(const std::string& endpoint) {
  OtlpOptions options;
  return ParseEndpoint(endpoint, &options);
}

std::string ReadEnvironment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::StatusOr<OtlpOptions> ReadOtlpOptions(const std::string& endpoint, absl::string_view version,
                                            const Environment& environment) {
  OtlpOptions out;
  AWQD_RETURN_IF_ERROR(ParseEndpoint(endpoint, &out));
  const bool is_url = absl::StrContains(endpoint, "://");
  if (!is_url && ReadVariable(environment, "INSECURE") == "false") out.tls = true;
  AWQD_RETURN_IF_ERROR(ReadPem(environment, "CERTIFICATE", &out.ca));
  AWQD_RETURN_IF_ERROR(ReadPem(environment, "CLIENT_CERTIFICATE", &out.certificate));
  AWQD_RETURN_IF_ERROR(ReadPem(environment, "CLIENT_KEY", &out.key));
  out.headers =
      ParsePairs("OTEL_EXPORTER_OTLP_HEADERS", ReadVariable(environment, "HEADERS"), IsLegalHeader);
  out.resource = ReadResource(version, environment);
  out.gzip = ReadVariable(environment, "COMPRESSION") == "gzip";
  int64_t millis = 0;
  if (absl::SimpleAtoi(ReadVariable(environment, "TIMEOUT"), &millis) && millis > 0) {
    out.timeout = absl::Milliseconds(std::min<int64_t>(millis, 60'000));
  }
  return out;
}

std::string EndpointOfEnvironment(const Environment& environment) {
  const std::string endpoint = ReadVariable(environment, "ENDPOINT");
  if (endpoint.empty() || absl::EqualsIgnoreCase(environment("OTEL_SDK_DISABLED"), "true")) {
    return "";
  }
  const std::string exporter = environment("OTEL_TRACES_EXPORTER");
  const std::string protocol = ReadVariable(environment, "PROTOCOL");
  const bool is_otlp = exporter.empty() || absl::StrContains(exporter, "otlp");
  if (is_otlp && (protocol.empty() || protocol == "grpc")) return endpoint;
  obs::LogEvent(obs::LogLevel::kWarning, "no traces: the environment asks for another exporter",
                {{"OTEL_TRACES_EXPORTER", obs::LogText(exporter)},
                 {"OTEL_EXPORTER_OTLP_PROTOCOL", obs::LogText(protocol)},
                 {"expected", "otlp over grpc"}});
  return "";
}

double SampleOfEnvironment(const Environment& environment) {
  const std::string sampler = environment("OTEL_TRACES_SAMPLER");
  if (absl::EndsWith(sampler, "always_on")) return 1;
  if (!absl::EndsWith(sampler, "traceidratio")) return 0;
  double ratio = 0;
  const std::string argument = environment("OTEL_TRACES_SAMPLER_ARG");
  if (argument.empty()) return 1;
  return absl::SimpleAtod(argument, &ratio) && ratio >= 0 && ratio <= 1 ? ratio : 0;
}

std::unique_ptr<obs::SpanExporter> MakeOtlpExporter(const OtlpOptions& options) {
  return std::make_unique<OtlpExporter>(options);
}

}  // namespace awqd::otlp
