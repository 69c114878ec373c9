// One unary call for each export.
#include "server/otlp/otlp_exporter.h"

#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/impl/client_unary_call.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/impl/rpc_method.h"
#include "grpcpp/security/credentials.h"
#include "otlp/trace.pb.h"

namespace awqd::otlp {
namespace {

using ::otlp::ExportTraceRequest;
using ::otlp::ExportTraceResponse;

constexpr char kMethod[] = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
constexpr std::chrono::seconds kTimeout{5};

// Big-endian, as trace contexts are read.
std::string Bytes(uint64_t id) {
  std::string out(8, '\0');
  for (int i = 0; i < 8; ++i) out[i] = static_cast<char>(id >> (56 - 8 * i));
  return out;
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
    ::otlp::KeyValue* attribute = out->add_attributes();
    attribute->set_key(std::string(name));
    attribute->mutable_value()->set_string_value(value);
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

class OtlpExporter final : public obs::SpanExporter {
 public:
  OtlpExporter(const std::string& endpoint, absl::string_view version)
      : channel_(grpc::CreateChannel(endpoint, grpc::InsecureChannelCredentials())),
        version_(version) {}

  absl::Status Export(const std::vector<obs::Span>& spans) override {
    ExportTraceRequest request;
    ::otlp::ResourceSpans* resource = request.add_resource_spans();
    const std::pair<const char*, std::string> attributes[] = {{"service.name", "awqd"},
                                                              {"service.version", version_}};
    for (const auto& [key, value] : attributes) {
      ::otlp::KeyValue* attribute = resource->mutable_resource()->add_attributes();
      attribute->set_key(key);
      attribute->mutable_value()->set_string_value(value);
    }
    ::otlp::ScopeSpans* scope = resource->add_scope_spans();
    scope->mutable_scope()->set_name("awqd");
    scope->mutable_scope()->set_version(version_);
    for (const obs::Span& span : spans) Fill(span, scope->add_spans());
    return Send(request);
  }

 private:
  absl::Status Send(const ExportTraceRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kTimeout);
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

  const std::shared_ptr<grpc::Channel> channel_;
  const std::string version_;
};

}  // namespace

std::unique_ptr<obs::SpanExporter> MakeOtlpExporter(const std::string& endpoint,
                                                    absl::string_view version) {
  return std::make_unique<OtlpExporter>(endpoint, version);
}

}  // namespace awqd::otlp
