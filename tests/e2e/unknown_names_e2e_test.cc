// A hundred thousand calls with names that do not exist leave no series and no memory behind.
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/e2e/json_lines.h"
#include "tests/e2e/server_test.h"
#include "tests/server/obs/http_get.h"

namespace awqd {
namespace {

constexpr int kCalls = 100'000;
constexpr int kInFlight = 64;

// A call with a new method, model, weight and request id.
struct Unknown {
  grpc::ClientContext context;
  grpc::ByteBuffer response;
  grpc::Status status;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;

  Unknown(int number, grpc::GenericStub* stub, grpc::CompletionQueue* queue) {
    v1::QuantizedMatmulRequest request = ProductOfZeros(1, 64);
    request.set_request_id(absl::StrCat("request-", number));
    request.mutable_weight()->set_model(absl::StrCat("model-", number));
    request.mutable_weight()->set_weight(absl::StrCat("weight-", number));
    const grpc::Slice slice(request.SerializeAsString());
    // Every other call has a method that does not exist.
    const std::string method = number % 2 == 0
                                   ? "/awqd.v1.QuantizedInference/QuantizedMatmul"
                                   : absl::StrCat("/service", number, "/Method", number);
    reader = stub->PrepareUnaryCall(&context, method, grpc::ByteBuffer(&slice, 1), queue);
    reader->StartCall();
    reader->Finish(&response, &status, this);
  }
};

class UnknownNamesTest : public ServerTest {
 protected:
  void SetUp() override {
    SyntheticAwq::Random(64, 16, 32, 1).Write(repository_ / "m");
    Start({"--log_format=json", "--metrics_address=127.0.0.1:0"});
    for (const nlohmann::json& event : JsonLines(server_->log())) {
      if (IsMessage("metrics")(event)) metrics_port_ = event["port"];
    }
    ASSERT_NE(metrics_port_, 0);
  }

  // Names and labels of all series.
  std::set<std::string> Series() const {
    std::set<std::string> out;
    for (const absl::string_view line : absl::StrSplit(
             testing::HttpGet(metrics_port_, "/metrics").body, '\n', absl::SkipEmpty())) {
      if (line[0] != '#') out.insert(std::string(line.substr(0, line.rfind(' '))));
    }
    return out;
  }

  // Makes `count` calls; returns how many ended with NOT_FOUND and UNIMPLEMENTED.
  std::pair<int, int> CallAll(int count) {
    grpc::GenericStub stub(server_->NewChannel());
    grpc::CompletionQueue queue;
    int sent = 0, not_found = 0, unimplemented = 0;
    while (sent < std::min(count, kInFlight)) new Unknown(number_ + sent++, &stub, &queue);
    void* tag = nullptr;
    bool ok = false;
    for (int ended = 0; ended < count && queue.Next(&tag, &ok); ++ended) {
      const std::unique_ptr<Unknown> call(static_cast<Unknown*>(tag));
      not_found += call->status.error_code() == grpc::NOT_FOUND;
      unimplemented += call->status.error_code() == grpc::UNIMPLEMENTED;
      if (sent < count) new Unknown(number_ + sent++, &stub, &queue);
    }
    number_ += count;
    return {not_found, unimplemented};
  }

  int metrics_port_ = 0;
  int number_ = 0;
};

TEST_F(UnknownNamesTest, LeaveNoSeriesAndNoMemory) {
  CallAll(kCalls / 10);  // fills the memory that gRPC and the allocator keep
  const std::set<std::string> before = Series();
  const int64_t rss = server_->rss_bytes();
  const auto [not_found, unimplemented] = CallAll(kCalls);
  EXPECT_EQ(not_found, kCalls / 2);
  EXPECT_EQ(unimplemented, kCalls / 2);
  EXPECT_EQ(Series(), before);
  // 100 bytes for each name would be 10 MB.
  EXPECT_LT(server_->rss_bytes() - rss, 5 << 20);
  Stop();
}

}  // namespace
}  // namespace awqd
