// Bounds of clients: message sizes, compression, unknown methods, threads.
#include <pthread.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/services/raw_call.h"
#include "tests/server/services/rpc_fixture.h"

namespace awqd::services {
namespace {

using LimitsTest = RpcTest;

// A matmul request of exactly `bytes` on the wire, padded by its weight's name.
v1::QuantizedMatmulRequest OfSize(int64_t bytes) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  int64_t pad = bytes - static_cast<int64_t>(request.ByteSizeLong());
  while (true) {
    request.mutable_weight()->set_weight(std::string(pad, 'w'));
    const int64_t over = static_cast<int64_t>(request.ByteSizeLong()) - bytes;
    if (over == 0) return request;
    pad -= over;
  }
}

TEST_F(LimitsTest, ReceiveLimitIsExact) {
  v1::QuantizedMatmulResponse response;
  for (int64_t size : {kMessageLimit - 1, kMessageLimit}) {
    const grpc::Status status = Matmul(OfSize(size), &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << size;  // the long name
  }
  for (int64_t size : {kMessageLimit + 1, 10 * kMessageLimit}) {
    const grpc::Status status = Matmul(OfSize(size), &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << size;
    EXPECT_EQ(status.error_message(),
              absl::StrCat("request: got ", size, " bytes, expected at most ", kMessageLimit,
                           " (the server's max_receive_message_bytes)"));
    EXPECT_FALSE(status.error_details().empty()) << "names the field";
  }
  EXPECT_TRUE(Matmul(GoodMatmul(), &response).ok());
}

TEST_F(LimitsTest, AMessageThatIsTooLongLeavesItsStreamOpen) {
  grpc::ClientContext context;
  Deadline(&context);
  const auto stream = stub_->QuantizedMatmulStream(&context);
  v1::QuantizedMatmulRequest large = OfSize(kMessageLimit + 1000);
  large.set_request_id("large");
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(stream->Write(large) && stream->Read(&response));
  EXPECT_EQ(response.error().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(response.error().message(), ::testing::HasSubstr("max_receive_message_bytes"));
  EXPECT_EQ(response.error().details_size(), 1);
  EXPECT_EQ(response.request_id(), "large");
  ASSERT_TRUE(stream->Write(GoodMatmul()) && stream->Read(&response));
  EXPECT_FALSE(response.has_error());
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(LimitsTest, ACallWithoutARequestIsTheClientsMistake) {
  for (const char* method :
       {"/awqd.v1.QuantizedInference/QuantizedMatmul", "/awqd.v1.QuantizedInference/Dequantize",
        "/awqd.v1.QuantizedInference/DequantizeStream", "/awqd.v1.ModelRepository/LoadModel",
        "/awqd.v1.ServerInfo/GetServerInfo", "/grpc.health.v1.Health/Check"}) {
    RawStream stream(channel_, method);
    EXPECT_TRUE(stream.WritesDone());
    const grpc::Status status = stream.Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method;
    EXPECT_EQ(status.error_message(), "request: got no message, expected one");
  }
}

TEST_F(LimitsTest, AShapeOfManyDimensionsIsRefusedBeforeItIsParsed) {
  // Field 3, activations, with field 2, the shape.
  std::string shape(600000, '\x01');
  const std::string inner = std::string("\x12\xc0\xcf\x24") + shape;
  const std::string payload = std::string("\x1a\xc4\xcf\x24") + inner;
  const grpc::Status status =
      RawCall(channel_, "/awqd.v1.QuantizedInference/QuantizedMatmul", payload);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(),
              ::testing::HasSubstr("activations.shape: got 600000 bytes of values"));
}

TEST_F(LimitsTest, CompressedRequestsAreRefused) {
  for (grpc_compression_algorithm algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
    grpc::ClientContext context;
    context.set_compression_algorithm(algorithm);
    v1::QuantizedMatmulResponse response;
    const grpc::Status status = stub_->QuantizedMatmul(&context, GoodMatmul(), &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_THAT(status.error_message(), ::testing::HasSubstr("disabled"));
  }
}

TEST_F(LimitsTest, UnknownMethodsAreUnimplemented) {
  for (const char* method : {"/awqd.v1.QuantizedInference/Nope", "/nope.Nope/Nope", "/x"}) {
    EXPECT_EQ(RawCall(channel_, method, "").error_code(), grpc::StatusCode::UNIMPLEMENTED);
  }
}

// Methods with small messages, and their requests.
const std::pair<const char*, const char*> kSmall[] = {
    {"/awqd.v1.ModelRepository/GetModel", "GetModelRequest"},
    {"/awqd.v1.ModelRepository/ListModels", "ListModelsRequest"},
    {"/awqd.v1.ModelRepository/LoadModel", "LoadModelRequest"},
    {"/awqd.v1.ModelRepository/UnloadModel", "UnloadModelRequest"},
    {"/awqd.v1.ServerInfo/GetServerInfo", "GetServerInfoRequest"},
    {"/grpc.health.v1.Health/Check", "HealthCheckRequest"},
    {"/grpc.health.v1.Health/Watch", "HealthCheckRequest"}};

TEST_F(LimitsTest, BytesThatAreNoMessageAreRefusedCleanly) {
  for (const char* method :
       {"/awqd.v1.QuantizedInference/QuantizedMatmul", "/awqd.v1.QuantizedInference/Dequantize"}) {
    for (const char* payload : {"\x0a\xff", "\x7b\x7c"}) {
      const grpc::Status status = RawCall(channel_, method, payload);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method;
      EXPECT_THAT(status.error_message(), ::testing::HasSubstr("do not parse"));
    }
  }
  const std::string method = "/awqd.v1.QuantizedInference/QuantizedMatmul";
  std::string groups(100, '\x0b');  // 100 nested groups that never end
  for (const std::string& payload :
       {std::string("\x0a\xff"), std::string("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
        std::string("\x0a\x7f\x01"), groups, std::string("\x7b\x7c"),
        std::string("\x42\x02\xc3\x28")}) {
    const grpc::Status status = RawCall(channel_, method, payload);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), ::testing::HasSubstr("do not parse"));
  }
  for (const auto& [small, message] : kSmall) {
    const grpc::Status status = RawCall(channel_, small, "\x0a\xff");
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << small;
    EXPECT_THAT(status.error_message(), ::testing::HasSubstr(message));
  }
  // To Protocol Buffers a known field with the wrong wire type is an unknown field, so the request
  // is empty.
  EXPECT_EQ(RawCall(channel_, method, std::string("\x08\x01")).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  v1::QuantizedMatmulResponse response;
  EXPECT_TRUE(Matmul(GoodMatmul(), &response).ok());
}

TEST_F(LimitsTest, SmallMessagesAreSmall) {
  for (const auto& [method, message] : kSmall) {
    // Unknown fields, which every message may have.
    const grpc::Status over =
        RawCall(channel_, method, std::string("\x7a\xfd\xff\x03") + std::string(65533, 'x'));
    EXPECT_EQ(over.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << method;
    EXPECT_THAT(over.error_message(),
                ::testing::HasSubstr("request: got 65537 bytes, expected at most 65536"));
    EXPECT_THAT(over.error_message(), ::testing::HasSubstr(message));
  }
  // A call that ends by itself, in contrast to Watch.
  EXPECT_TRUE(
      RawCall(channel_, kSmall[1].first, std::string("\x7a\xfc\xff\x03") + std::string(65532, 'x'))
          .ok());
}

TEST_F(LimitsTest, TwoServersNeverShareAPort) {
  Options options;
  options.transport.addresses = {server_->address()};
  const absl::Status status = RpcServer::Start(options, &engine_, models_.get()).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(server_->address()));
}

// While it exists, no thread can be created, because a stack would have to fill the address space.
class NoThreads {
 public:
  NoThreads() {
    pthread_attr_t endless;
    pthread_attr_init(&endless);
    EXPECT_EQ(pthread_getattr_default_np(&before_), 0);
    EXPECT_EQ(pthread_attr_setstacksize(&endless, size_t{1} << 47), 0);
    EXPECT_EQ(pthread_setattr_default_np(&endless), 0);
    EXPECT_THROW(std::thread([] {}).join(), std::system_error);
    pthread_attr_destroy(&endless);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

TEST_F(LimitsTest, ShutsDownWhereNoThreadCanBeMade) {
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(Matmul(GoodMatmul(), &response).ok());
  const absl::Time begin = absl::Now();
  {
    const NoThreads none;
    server_->Shutdown(absl::Seconds(15));
  }
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  server_ = nullptr;
  EXPECT_EQ(Matmul(GoodMatmul(), &response).error_code(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace awqd::services
