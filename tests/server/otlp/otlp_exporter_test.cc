// Spans on the wire: to a collector that accepts them, to one that refuses, and to none.
#include "server/otlp/otlp_exporter.h"

#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "otlp/trace.pb.h"

namespace awqd::otlp {
namespace {

using ::testing::HasSubstr;

// Receives one message of any method, and answers as the test has set.
class Collector : public grpc::CallbackGenericService {
 public:
  Collector() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterCallbackGenericService(this);
    server_ = builder.BuildAndStart();
  }
  ~Collector() override { server_->Shutdown(std::chrono::system_clock::now()); }

  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

  grpc::Status status;
  ::otlp::ExportTraceResponse response;
  std::string method;
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

TEST(OtlpExporter, SendsSpansAsTheCollectorWantsThem) {
  Collector collector;
  obs::Span call = Step();
  call.server = call.failed = true;
  call.parent = 0;
  ASSERT_EQ(MakeOtlpExporter(collector.address(), "1.2.3")->Export({call, Step()}),
            absl::OkStatus());
  EXPECT_EQ(collector.method, "/opentelemetry.proto.collector.trace.v1.TraceService/Export");
  ASSERT_EQ(collector.request.resource_spans_size(), 1);
  const ::otlp::ResourceSpans& resource = collector.request.resource_spans(0);
  EXPECT_EQ(resource.resource().attributes(0).key(), "service.name");
  EXPECT_EQ(resource.resource().attributes(0).value().string_value(), "awqd");
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
  const auto exporter = MakeOtlpExporter(collector.address(), "1");
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
  EXPECT_TRUE(absl::IsUnavailable(MakeOtlpExporter(address, "1")->Export({Step()})));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(6));
}

}  // namespace
}  // namespace awqd::otlp
