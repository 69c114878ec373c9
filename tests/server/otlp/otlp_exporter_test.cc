// Spans on the wire: to a collector that accepts them, to one that refuses, and to none.
#include "server/otlp/otlp_exporter.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "otlp/trace.pb.h"
#include "tests/testing/certificates.h"

namespace awqd::otlp {
namespace {

using ::testing::HasSubstr;

// Receives one message of any method, and answers as the test has set.
class Collector : public grpc::CallbackGenericService {
 public:
  explicit Collector(const std::shared_ptr<grpc::ServerCredentials>& credentials =
                         grpc::InsecureServerCredentials()) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", credentials, &port_);
    builder.RegisterCallbackGenericService(this);
    server_ = builder.BuildAndStart();
  }
  ~Collector() override { server_->Shutdown(std::chrono::system_clock::now()); }

  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

  grpc::Status status;
  ::otlp::ExportTraceResponse response;
  std::string method, key;  // the header x-key
  ::otlp::ExportTraceRequest request;

 private:
  class Call : public grpc::ServerGenericBidiReactor {
   public:
    explicit Call(Collector* collector) : collector_(collector) { StartRead(&message_); }
    void OnReadDone(bool ok) override {
      if (!ok) return Finish(grpc::Status(grpc::INTERNAL, "no message"));
      std::vector<grpc::Slice> slices;
      message_.Dump(&slices);
      std::string bytes;
      for (const grpc::Slice& slice : slices) {
        bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
      }
      EXPECT_TRUE(collector_->request.ParseFromString(bytes));
      if (!collector_->status.ok()) return Finish(collector_->status);
      const grpc::Slice answer(collector_->response.SerializeAsString());
      answer_ = grpc::ByteBuffer(&answer, 1);
      StartWriteAndFinish(&answer_, grpc::WriteOptions(), grpc::Status::OK);
    }
    void OnDone() override { delete this; }

   private:
    Collector* const collector_;
    grpc::ByteBuffer message_, answer_;
  };

  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    method = context->method();
    const auto it = context->client_metadata().find("x-key");
    if (it != context->client_metadata().end()) key.assign(it->second.data(), it->second.size());
    return new Call(this);
  }

  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

obs::Span Step() {
  return {.trace_high = 0x0102030405060708,
          .trace_low = 0x090a0b0c0d0e0f10,
          .id = 0x1112131415161718,
          .parent = 0x2122232425262728,
          .name = "compute",
          .begin = absl::FromUnixNanos(1000),
          .end = absl::FromUnixNanos(3000),
          .texts = {{"awqd.model", "m"}},
          .numbers = {{"awqd.tokens", -1}},
          .links = {{0x3132333435363738, 0x4142434445464748, 0x5152535455565758}}};
}

using Variables = std::map<std::string, std::string>;

Environment Set(const Variables& variables) {
  return [variables](const char* name) {
    const auto it = variables.find(name);
    return it == variables.end() ? "" : it->second;
  };
}

std::unique_ptr<obs::SpanExporter> Exporter(const std::string& endpoint,
                                            const Variables& variables = {}) {
  return MakeOtlpExporter(*ReadOtlpOptions(endpoint, "1.2.3", Set(variables)));
}

std::string Attribute(const OtlpOptions& options, const std::string& key) {
  for (const auto& [name, value] : options.resource) {
    if (name == key) return value;
  }
  return "(none)";
}

TEST(OtlpOptions, ReadsEndpoints) {
  const auto read = [](const std::string& endpoint) {
    const auto options = ReadOtlpOptions(endpoint, "1", Set({}));
    if (!options.ok()) return std::string("refused");
    return absl::StrCat(options->target, options->tls ? " tls" : "",
                        options->loopback ? " loopback" : "");
  };
  EXPECT_EQ(read("collector:4317"), "collector:4317");
  EXPECT_EQ(read("http://collector:4317"), "collector:4317");
  EXPECT_EQ(read("http://collector"), "collector:4317");
  EXPECT_EQ(read("https://collector.example.org/v1/traces"), "collector.example.org:4317 tls");
  EXPECT_EQ(read("http://127.0.0.1:99"), "127.0.0.1:99 loopback");
  EXPECT_EQ(read("https://[::1]"), "[::1]:4317 tls loopback");
  EXPECT_EQ(read("localhost:1"), "localhost:1 loopback");
  EXPECT_EQ(read("unix:/run/otlp"), "unix:/run/otlp loopback");
  EXPECT_EQ(read("dns:///collector:4317"), "dns:///collector:4317");
  for (const char* bad : {"", "collector", "http://", "grpc://a:1", "a:0", "a:x", "http://a:b"}) {
    EXPECT_EQ(read(bad), "refused") << bad;
  }
}

TEST(OtlpOptions, SaysWhichProcessItIs) {
  const auto options = *ReadOtlpOptions("a:1", "1.2.3", Set({}));
  EXPECT_EQ(Attribute(options, "service.name"), "awqd");
  EXPECT_EQ(Attribute(options, "service.version"), "1.2.3");
  EXPECT_NE(Attribute(options, "host.name"), "(none)");
  EXPECT_THAT(Attribute(options, "service.instance.id"),
              ::testing::MatchesRegex("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-"
                                      "[0-9a-f]{12}"));
  EXPECT_NE(Attribute(options, "service.instance.id"),
            Attribute(*ReadOtlpOptions("a:1", "1.2.3", Set({})), "service.instance.id"));
  const auto named = *ReadOtlpOptions(
      "a:1", "1",
      Set({{"OTEL_SERVICE_NAME", "embeddings"},
           {"OTEL_RESOURCE_ATTRIBUTES",
            "k8s.pod.name=pod-7, team=a%2Cb ,service.name=other,nonsense,service.instance.id=i"}}));
  EXPECT_EQ(named.resource.front(),
            (std::pair<std::string, std::string>("service.name", "embeddings")));
  EXPECT_EQ(Attribute(named, "k8s.pod.name"), "pod-7");
  EXPECT_EQ(Attribute(named, "team"), "a,b");
  EXPECT_EQ(Attribute(named, "service.instance.id"), "i");
  EXPECT_EQ(Attribute(named, "nonsense"), "(none)");
}

TEST(OtlpOptions, ReadsTheVariablesOfExporters) {
  const auto options =
      *ReadOtlpOptions("a:1", "1",
                       Set({{"OTEL_EXPORTER_OTLP_HEADERS", "x-key=other"},
                            {"OTEL_EXPORTER_OTLP_TRACES_HEADERS",
                             "x-key=s%20ecret, Bad=1,grpc-timeout=1,a-bin=1,b=%0A,plain"},
                            {"OTEL_EXPORTER_OTLP_INSECURE", "false"},
                            {"OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"},
                            {"OTEL_EXPORTER_OTLP_TIMEOUT", "1500"}}));
  EXPECT_THAT(options.headers, ::testing::ElementsAre(std::pair("x-key", "s ecret")));
  EXPECT_TRUE(options.tls);
  EXPECT_TRUE(options.gzip);
  EXPECT_EQ(options.timeout, absl::Milliseconds(1500));
  const auto absent =
      ReadOtlpOptions("a:1", "1", Set({{"OTEL_EXPORTER_OTLP_CERTIFICATE", "/nonexistent/ca.pem"}}));
  EXPECT_THAT(std::string(absent.status().message()),
              HasSubstr("OTEL_EXPORTER_OTLP_CERTIFICATE: got \"/nonexistent/ca.pem\""));
}

TEST(OtlpOptions, TheEnvironmentMayNameTheCollectorAndTheSample) {
  EXPECT_EQ(EndpointOfEnvironment(Set({})), "");
  const Variables named = {{"OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317"}};
  EXPECT_EQ(EndpointOfEnvironment(Set(named)), "http://c:4317");
  for (const auto& [name, value] : Variables{{"OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"},
                                             {"OTEL_TRACES_EXPORTER", "none"},
                                             {"OTEL_SDK_DISABLED", "true"}}) {
    Variables off = named;
    off[name] = value;
    EXPECT_EQ(EndpointOfEnvironment(Set(off)), "") << name;
  }
  EXPECT_EQ(SampleOfEnvironment(Set({})), 0);
  EXPECT_EQ(SampleOfEnvironment(Set({{"OTEL_TRACES_SAMPLER", "parentbased_always_on"}})), 1);
  EXPECT_EQ(SampleOfEnvironment(Set(
                {{"OTEL_TRACES_SAMPLER", "traceidratio"}, {"OTEL_TRACES_SAMPLER_ARG", "0.25"}})),
            0.25);
}

TEST(OtlpExporter, SendsHeadersAndNotThroughAProxyOnThisMachine) {
  Collector collector;
  setenv("http_proxy", "http://127.0.0.1:1", 1);
  const absl::Status status = Exporter(absl::StrCat("http://", collector.address()),
                                       {{"OTEL_EXPORTER_OTLP_HEADERS", "x-key=value"}})
                                  ->Export({Step()});
  unsetenv("http_proxy");
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(collector.key, "value");
}

TEST(OtlpExporter, SpeaksTls) {
  const CertificateAuthority ca("ca"), client_ca("clients");
  const CertifiedKey own = ca.Issue({.common_name = "c", .alternative_names = "IP:127.0.0.1"});
  const CertifiedKey client = client_ca.Issue({.common_name = "awqd"});
  grpc::SslServerCredentialsOptions tls(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  tls.pem_root_certs = client_ca.certificate();
  tls.pem_key_cert_pairs = {{own.key, own.certificate}};
  Collector collector(grpc::SslServerCredentials(tls));
  const auto write = [](const std::string& name, const std::string& text) {
    const std::string path = absl::StrCat(::testing::TempDir(), "/otlp_", getpid(), "_", name);
    std::ofstream(path) << text;
    return path;
  };
  const Variables files = {
      {"OTEL_EXPORTER_OTLP_CERTIFICATE", write("ca", ca.certificate())},
      {"OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", write("certificate", client.certificate)},
      {"OTEL_EXPORTER_OTLP_CLIENT_KEY", write("key", client.key)}};
  EXPECT_EQ(Exporter("https://" + collector.address(), files)->Export({Step()}), absl::OkStatus());
  EXPECT_FALSE(Exporter("http://" + collector.address(), files)->Export({Step()}).ok());
}

TEST(OtlpExporter, SendsSpansAsTheCollectorWantsThem) {
  Collector collector;
  obs::Span call = Step();
  call.server = call.failed = true;
  call.parent = 0;
  ASSERT_EQ(Exporter(collector.address())->Export({call, Step()}), absl::OkStatus());
  EXPECT_EQ(collector.method, "/opentelemetry.proto.collector.trace.v1.TraceService/Export");
  ASSERT_EQ(collector.request.resource_spans_size(), 1);
  const ::otlp::ResourceSpans& resource = collector.request.resource_spans(0);
  EXPECT_EQ(resource.resource().attributes(0).key(), "service.name");
  EXPECT_EQ(resource.resource().attributes(0).value().string_value(), "awqd");
  EXPECT_EQ(resource.resource().attributes(1).value().string_value(), "1.2.3");
  ASSERT_EQ(resource.scope_spans(0).spans_size(), 2);
  const ::otlp::Span& first = resource.scope_spans(0).spans(0);
  const ::otlp::Span& second = resource.scope_spans(0).spans(1);
  EXPECT_EQ(first.trace_id(), "\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10");
  EXPECT_EQ(first.span_id(), "\x11\x12\x13\x14\x15\x16\x17\x18");
  EXPECT_EQ(first.parent_span_id(), "");
  EXPECT_EQ(first.kind(), 2);
  EXPECT_EQ(first.status().code(), 2);
  EXPECT_EQ(second.parent_span_id(), "\x21\x22\x23\x24\x25\x26\x27\x28");
  EXPECT_EQ(second.kind(), 1);
  EXPECT_EQ(second.start_time_unix_nano(), 1000u);
  EXPECT_EQ(second.end_time_unix_nano(), 3000u);
  EXPECT_EQ(second.attributes(0).value().string_value(), "m");
  ASSERT_EQ(second.links_size(), 1);
  EXPECT_EQ(second.links(0).trace_id(), "12345678ABCDEFGH");
  EXPECT_EQ(second.links(0).span_id(), "QRSTUVWX");
  EXPECT_EQ(second.attributes(1).value().int_value(), -1);
}

TEST(OtlpExporter, SaysWhatTheCollectorRefused) {
  Collector collector;
  const auto exporter = Exporter(collector.address());
  collector.response.mutable_partial_success()->set_rejected_spans(1);
  collector.response.mutable_partial_success()->set_error_message("too old");
  const absl::Status partly = exporter->Export({Step()});
  EXPECT_TRUE(absl::IsResourceExhausted(partly));
  EXPECT_THAT(std::string(partly.message()), HasSubstr("1 spans less than it got: too old"));
  collector.status = grpc::Status(grpc::PERMISSION_DENIED, "not you");
  const absl::Status refused = exporter->Export({Step()});
  EXPECT_TRUE(absl::IsPermissionDenied(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("not you"));
}

TEST(OtlpExporter, NoCollectorIsAnErrorAtOnce) {
  std::string address;
  { address = Collector().address(); }
  const absl::Time begin = absl::Now();
  EXPECT_TRUE(absl::IsUnavailable(Exporter(address)->Export({Step()})));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(6));
}

}  // namespace
}  // namespace awqd::otlp
