// Reflection: each kind of question, in both packages, and streams that stay open.
#include <memory>

#include "tests/server/services/raw_call.h"
#include "tests/server/services/rpc_fixture.h"

namespace awqd::services {
namespace {

using grpc::reflection::v1::ServerReflectionRequest;
using grpc::reflection::v1::ServerReflectionResponse;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

class ReflectionTest : public RpcTest {
 protected:
  static std::vector<std::string> FilesOf(const ServerReflectionResponse& response) {
    std::vector<std::string> names;
    for (const std::string& file : response.file_descriptor_response().file_descriptor_proto()) {
      google::protobuf::FileDescriptorProto proto;
      EXPECT_TRUE(proto.ParseFromString(file));
      names.push_back(proto.name());
    }
    return names;
  }
  std::vector<std::string> FilesOfSymbol(const std::string& symbol) {
    ServerReflectionRequest request;
    request.set_file_containing_symbol(symbol);
    return FilesOf(Reflect(channel_, request));
  }
  void IsRefused(const ServerReflectionRequest& request, grpc::StatusCode code,
                 const std::string& message) {
    const ServerReflectionResponse response = Reflect(channel_, request);
    EXPECT_EQ(response.error_response().error_code(), code) << request.DebugString();
    EXPECT_THAT(response.error_response().error_message(), HasSubstr(message));
  }
};

TEST_F(ReflectionTest, ListsEveryServiceInBothPackages) {
  for (const char* method : {kReflection, kReflectionAlpha}) {
    EXPECT_THAT(ServicesByReflection(channel_, method),
                UnorderedElementsAre("awqd.v1.QuantizedInference", "awqd.v1.ModelRepository",
                                     "awqd.v1.ServerInfo", "grpc.health.v1.Health",
                                     "inference.GRPCInferenceService",
                                     "grpc.reflection.v1.ServerReflection",
                                     "grpc.reflection.v1alpha.ServerReflection"));
  }
}

TEST_F(ReflectionTest, SendsAFileAndWhatItImports) {
  ServerReflectionRequest request;
  request.set_host("here");
  request.set_file_by_filename("awqd/v1/inference.proto");
  const ServerReflectionResponse response = Reflect(channel_, request);
  EXPECT_THAT(FilesOf(response), ElementsAre("awqd/v1/inference.proto", "awqd/v1/tensor.proto",
                                             "google/protobuf/any.proto"));
  EXPECT_EQ(response.valid_host(), "here");
  EXPECT_EQ(response.original_request().file_by_filename(), "awqd/v1/inference.proto");
}

TEST_F(ReflectionTest, FindsSymbolsOfEveryKind) {
  for (const char* symbol :
       {"awqd.v1.QuantizedInference", "awqd.v1.QuantizedInference.Dequantize",
        "awqd.v1.DequantizeRequest", "awqd.v1.DequantizeRequest.output_dtype"}) {
    EXPECT_THAT(FilesOfSymbol(symbol), Contains("awqd/v1/inference.proto")) << symbol;
  }
  EXPECT_THAT(FilesOfSymbol("awqd.v1.DType"), Contains("awqd/v1/tensor.proto"));
  EXPECT_THAT(FilesOfSymbol("grpc.health.v1.Health"), ElementsAre("grpc/health/v1/health.proto"));
  for (const char* package : {"v1", "v1alpha"}) {
    EXPECT_THAT(FilesOfSymbol(std::string("grpc.reflection.") + package + ".ServerReflection"),
                ElementsAre(std::string("grpc/reflection/") + package + "/reflection.proto"));
  }
}

TEST_F(ReflectionTest, DescribesTheDetailsOfErrors) {
  EXPECT_THAT(FilesOfSymbol("google.rpc.BadRequest"), Contains("google/rpc/error_details.proto"));
  EXPECT_THAT(FilesOfSymbol("google.rpc.Status"), Contains("google/rpc/status.proto"));
}

TEST_F(ReflectionTest, MessagesHaveNoExtensions) {
  ServerReflectionRequest request;
  request.set_all_extension_numbers_of_type("awqd.v1.Tensor");
  const ServerReflectionResponse response = Reflect(channel_, request);
  EXPECT_EQ(response.all_extension_numbers_response().base_type_name(), "awqd.v1.Tensor");
  EXPECT_EQ(response.all_extension_numbers_response().extension_number_size(), 0);
}

TEST_F(ReflectionTest, AnswersQuestionsThatItCannotWithAnError) {
  constexpr auto kNotFound = grpc::StatusCode::NOT_FOUND;
  ServerReflectionRequest request;
  IsRefused(request, grpc::StatusCode::UNIMPLEMENTED, "message_request: got none");
  request.set_file_by_filename("no.proto");
  IsRefused(request, kNotFound, "file_by_filename: got \"no.proto\"");
  request.set_file_containing_symbol("no.Symbol");
  IsRefused(request, kNotFound, "file_containing_symbol: got \"no.Symbol\"");
  request.set_file_containing_symbol(std::string(10000, '.'));
  IsRefused(request, kNotFound, "file_containing_symbol: got \"...");
  request.set_all_extension_numbers_of_type("no.Type");
  IsRefused(request, kNotFound, "all_extension_numbers_of_type: got \"no.Type\"");
  for (const char* type : {"no.Type", "awqd.v1.Tensor"}) {
    request.mutable_file_containing_extension()->set_containing_type(type);
    request.mutable_file_containing_extension()->set_extension_number(7);
    IsRefused(request, kNotFound, "file_containing_extension: got \"" + std::string(type) + " 7\"");
  }
}

TEST_F(ReflectionTest, AStreamAnswersInOrderAndOutlivesItsErrors) {
  RawStream stream(channel_, kReflection);
  for (const char* file : {"no.proto", "awqd/v1/tensor.proto", "no.proto"}) {
    ServerReflectionRequest request;
    request.set_file_by_filename(file);
    std::string answer;
    ASSERT_TRUE(stream.Write(request.SerializeAsString()) && stream.Read(&answer));
    ServerReflectionResponse response;
    ASSERT_TRUE(response.ParseFromString(answer));
    EXPECT_EQ(response.original_request().file_by_filename(), file);
    EXPECT_EQ(response.has_error_response(), std::string(file) == "no.proto");
  }
  std::string answer;
  EXPECT_TRUE(stream.WritesDone());
  EXPECT_FALSE(stream.Read(&answer));
  EXPECT_TRUE(stream.Finish().ok());
}

TEST_F(ReflectionTest, BytesThatAreNoRequestEndTheStream) {
  grpc::Status status = RawCall(channel_, kReflection, "\x0a\xff");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("ServerReflectionRequest"));
  ServerReflectionRequest request;
  request.set_host(std::string(65536, 'x'));
  status = RawCall(channel_, kReflection, request.SerializeAsString());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("expected at most 65536"));
}

TEST_F(ReflectionTest, AnIdleStreamEndsWithTheServer) {
  RawStream stream(channel_, kReflection);
  ServerReflectionRequest request;
  request.set_list_services("");
  std::string answer;
  ASSERT_TRUE(stream.Write(request.SerializeAsString()) && stream.Read(&answer));
  const absl::Time begin = absl::Now();
  std::thread stop([&] { server_->Shutdown(absl::Seconds(15)); });
  EXPECT_FALSE(stream.Read(&answer));
  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  stop.join();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  server_ = nullptr;
}

int ThreadsOfThisProcess() {
  std::ifstream status("/proc/self/status");
  int threads = 0;
  for (std::string word; status >> word;) {
    if (word == "Threads:") status >> threads;
  }
  return threads;
}

TEST_F(ReflectionTest, SoManyStreamsMayBeOpenAndTakeNoThread) {
  constexpr int kStreams = 200, kOpen = 32;
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(Matmul(GoodMatmul(), &response).ok());
  const int before = ThreadsOfThisProcess();
  grpc::GenericStub stub(channel_);
  grpc::CompletionQueue queue;
  struct Stream {
    grpc::ClientContext context;
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call;
    grpc::Status status;
  };
  std::vector<Stream> streams(kStreams);
  const auto next = [&queue]() -> Stream* {
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue.Next(&tag, &ok));
    return static_cast<Stream*>(tag);
  };
  for (int i = 0; i < kStreams; ++i) {
    Stream& stream = streams[i];
    Deadline(&stream.context);
    stream.call =
        stub.PrepareCall(&stream.context, i % 2 == 0 ? kReflection : kReflectionAlpha, &queue);
    stream.call->StartCall(nullptr);
    stream.call->Finish(&stream.status, &stream);
  }
  for (int refused = 0; refused < kStreams - kOpen;) {
    const Stream* stream = next();
    if (stream == nullptr) continue;
    ++refused;
    ASSERT_EQ(stream->status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    ASSERT_THAT(stream->status.error_message(),
                HasSubstr("got one more stream, expected at most 32"));
  }
  EXPECT_LT(ThreadsOfThisProcess(), before + kOpen / 2) << "gRPC's own on both sides among them";
  EXPECT_TRUE(Matmul(GoodMatmul(), &response).ok());
  for (Stream& stream : streams) stream.context.TryCancel();
  queue.Shutdown();
  void* tag = nullptr;
  for (bool ok = false; queue.Next(&tag, &ok);) {
  }
  EXPECT_TRUE(Eventually([&] { return RawCall(channel_, kReflection, "").ok(); }));
}

class IdleReflectionTest : public RpcTest {
 protected:
  static constexpr absl::Duration kIdle = absl::Milliseconds(600);
  void Configure(Options* options) override { options->reflection_idle = kIdle; }
};

TEST_F(IdleReflectionTest, SilentStreamsEndAndMakeRoom) {
  constexpr int kOpen = 32;
  std::vector<std::unique_ptr<RawStream>> silent;
  for (int i = 0; i < kOpen; ++i) {
    silent.push_back(std::make_unique<RawStream>(channel_, kReflection));
  }
  EXPECT_TRUE(Eventually([&] { return RawCall(channel_, kReflection, "").ok(); }));
  std::string answer;
  EXPECT_FALSE(silent.front()->Read(&answer));
  const grpc::Status status = silent.front()->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("got no request for 600ms"));
}

TEST_F(IdleReflectionTest, AStreamThatAsksStaysOpen) {
  RawStream stream(channel_, kReflection);
  ServerReflectionRequest request;
  request.set_list_services("");
  std::string answer;
  const absl::Time begin = absl::Now();
  absl::Time last;
  while (absl::Now() - begin < 3 * kIdle) {
    last = absl::Now();
    ASSERT_TRUE(stream.Write(request.SerializeAsString()) && stream.Read(&answer));
    std::this_thread::sleep_for(absl::ToChronoMilliseconds(kIdle / 4));
  }
  EXPECT_FALSE(stream.Read(&answer)) << "silent from here on";
  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_GE(absl::Now() - last, kIdle);
}

class NoReflectionTest : public RpcTest {
  void Configure(Options* options) override { options->reflection = false; }
};

TEST_F(NoReflectionTest, ReflectionCanBeSwitchedOff) {
  for (const char* method : {kReflection, kReflectionAlpha}) {
    EXPECT_EQ(RawCall(channel_, method, "").error_code(), grpc::StatusCode::UNIMPLEMENTED);
  }
  EXPECT_THAT(server_->admission()->Services(), Each(::testing::Not(HasSubstr("reflection"))));
}

}  // namespace
}  // namespace awqd::services
