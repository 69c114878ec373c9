// The door: every kind of call passes it, and its record of a call that has ended.
#include "server/transport/door.h"

#include <grpcpp/generic/generic_stub.h>

#include "gmock/gmock.h"
#include "tests/server/transport/loop_fixture.h"

namespace awqd::transport {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class DoorTest : public LoopTest {
 protected:
  // The counts of `method`.
  MethodCalls Of(absl::string_view method) const {
    for (MethodCalls& calls : door_.Calls()) {
      if (calls.method == method) return std::move(calls);
    }
    ADD_FAILURE() << method << " is not in the table";
    return {};
  }

  // Sends one message of `bytes` to a method of any kind, and returns the status.
  grpc::Status Send(const std::string& method, size_t bytes) {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const grpc::Slice slice(std::string(bytes, 'x'));
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::Status status;
    const auto call = stub.PrepareUnaryCall(&context, "/" + method, request, &queue);
    call->StartCall();
    call->Finish(&response, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return status;
  }
};

INSTANTIATE_TEST_SUITE_P(Threads, DoorTest, testing::Values(1, 4));

TEST_P(DoorTest, KnowsEveryMethodFromItsOwnTable) {
  Start();
  std::vector<std::string> methods;
  for (const MethodCalls& calls : door_.Calls()) methods.push_back(calls.method);
  EXPECT_THAT(methods, ElementsAre(Door::kUnknownMethod, kUnary, kStream, kWrite, kAlways));
  EXPECT_THAT(door_.Services(), ElementsAre("awqd.v1.QuantizedInference"));
}

TEST_P(DoorTest, AHandlerMeetsCallsOfItsMethodFromAPeer) {
  Mutex mu;
  std::vector<std::string> methods;
  unary_ = [&](UnaryCall* call) {
    EXPECT_THAT(call->peer(), HasSubstr("127.0.0.1:"));
    EXPECT_EQ(call->deadline(), absl::InfiniteFuture());
    {
      MutexLock lock(&mu);
      methods.push_back(std::string(call->method()));
    }
    call->Answer(EmptyMessage());
  };
  Start();
  EXPECT_TRUE(Call().ok());
  EXPECT_TRUE(Send(kAlways, 0).ok());
  MutexLock lock(&mu);
  EXPECT_THAT(methods, ElementsAre(kUnary, kAlways));
}

TEST_P(DoorTest, CountsByMethodAndOutcomeOnce) {
  std::atomic<grpc::StatusCode> code{grpc::StatusCode::OK};
  unary_ = [&](UnaryCall* call) {
    code == grpc::StatusCode::OK ? call->Answer(EmptyMessage()) : call->Finish({code, "no"});
  };
  Start();
  for (int i = 0; i < MethodCalls::kOutcomes; ++i) {
    code = static_cast<grpc::StatusCode>(i);
    for (int times = 0; times <= i; ++times) EXPECT_EQ(Call().error_code(), code);
  }
  const MethodCalls calls = Of(kUnary);
  for (int i = 0; i < MethodCalls::kOutcomes; ++i) EXPECT_EQ(calls.outcomes[i], i + 1) << i;
  EXPECT_EQ(calls.total(), 17 * 18 / 2);
  EXPECT_EQ(Of(kAlways).total(), 0);
}

TEST_P(DoorTest, AStatusThatGrpcDoesNotHaveIsUnknown) {
  unary_ = [](UnaryCall* call) { call->Finish({grpc::StatusCode::DO_NOT_USE, ""}); };
  Start();
  EXPECT_FALSE(Call().ok());
  EXPECT_EQ(Of(kUnary).outcomes[grpc::StatusCode::UNKNOWN], 1);
  EXPECT_EQ(Of(kUnary).total(), 1);
}

TEST_P(DoorTest, AHandlerThatThrowsIsCounted) {
  unary_ = [](UnaryCall*) { throw std::bad_alloc(); };
  Start();
  EXPECT_FALSE(Call().ok());
  EXPECT_EQ(Of(kUnary).outcomes[grpc::StatusCode::RESOURCE_EXHAUSTED], 1);
  EXPECT_EQ(Of(kUnary).total(), 1);
}

TEST_P(DoorTest, CountsTheBytesOfMessagesAndTheTimeInside) {
  const std::string answer(70, 'y');
  const grpc::Slice slice(answer);
  const grpc::ByteBuffer message(&slice, 1);
  unary_ = [&](UnaryCall* call) {
    for (const absl::Time begin = absl::Now(); absl::Now() < begin + absl::Milliseconds(2);) {
    }
    call->Answer(message);
  };
  Recorder writer, reader;
  write_ = [&](WriteCall* call) {
    call->SetReactor(&writer);
    writer.on_write = [call] { call->Finish(grpc::Status::OK); };
    call->StartWrite(message);
  };
  grpc::ByteBuffer read;
  stream_ = [&](StreamCall* call) {
    call->SetReactor(&reader);
    reader.on_read = [&, call](bool ok) {
      ok ? call->StartWrite(message) : call->Finish(grpc::Status::OK);
    };
    reader.on_write = [&, call] { call->StartRead(&read); };
    call->StartRead(&read);
  };
  Start();
  for (const char* method : {kUnary, kWrite, kStream}) {
    EXPECT_TRUE(Send(method, 50000).ok()) << method;
    const MethodCalls calls = Of(method);
    EXPECT_EQ(calls.outcomes[grpc::StatusCode::OK], 1) << method;
    EXPECT_EQ(calls.received_bytes, 50000) << method;
    EXPECT_EQ(calls.sent_bytes, 70) << method;
    EXPECT_GT(calls.time, absl::ZeroDuration()) << method;
  }
  EXPECT_GE(Of(kUnary).time, absl::Milliseconds(2));
  ASSERT_TRUE(Eventually([&] { return writer.dones == 1 && reader.dones == 1; }));
  Stop();
}

TEST_P(DoorTest, UnknownMethodsPassItUnderOneName) {
  Start();
  for (const char* method :
       {"awqd.v1.QuantizedInference/Nope", "no.Service/Nope", "x", "(unknown)"}) {
    const grpc::Status status = Send(method, 10);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_THAT(status.error_message(), HasSubstr(std::string("method: got \"/") + method + "\""));
  }
  EXPECT_EQ(Of(Door::kUnknownMethod).outcomes[grpc::StatusCode::UNIMPLEMENTED], 4);
  EXPECT_EQ(door_.Calls().size(), 5u) << "names from the wire take no memory";
}

TEST_P(DoorTest, ADrainTurnsEveryKindOfCallAwayUnheard) {
  std::atomic<int> handled{0};
  unary_ = [&](UnaryCall* call) {
    ++handled;
    call->Answer(EmptyMessage());
  };
  stream_ = [&](StreamCall* call) {
    ++handled;
    call->Finish(grpc::Status::OK);
  };
  write_ = [&](WriteCall* call) {
    ++handled;
    call->Finish(grpc::Status::OK);
  };
  Start();
  const std::vector<std::string> turned_away = {kUnary, kStream, kWrite, "no.Service/Nope"};
  door_.gate()->Close();
  std::vector<std::thread> waiting;
  for (const std::string& method : turned_away) {
    waiting.emplace_back([&, method] {
      EXPECT_EQ(Send(method, 0).error_message(), CallGate::Draining().error_message()) << method;
    });
  }
  ASSERT_TRUE(Eventually([&] { return door_.gate()->turned_away() == 4; }));
  EXPECT_EQ(door_.gate()->in_flight(), 4) << "they wait";
  EXPECT_TRUE(Send(kAlways, 0).ok());
  EXPECT_EQ(door_.gate()->in_flight(), 4) << "one that is served anyhow holds nothing back";
  EXPECT_EQ(handled.exchange(0), 1);
  door_.gate()->Refuse();
  for (std::thread& caller : waiting) caller.join();
  for (const std::string& method : turned_away) {
    EXPECT_EQ(Send(method, 0).error_code(), grpc::StatusCode::UNAVAILABLE) << method;
  }
  EXPECT_TRUE(Send(kAlways, 0).ok());
  EXPECT_EQ(handled, 1);
  for (const absl::string_view method : {absl::string_view(kUnary), absl::string_view(kStream),
                                         absl::string_view(kWrite), Door::kUnknownMethod}) {
    EXPECT_EQ(Of(method).outcomes[grpc::StatusCode::UNAVAILABLE], 2) << method;
    EXPECT_EQ(Of(method).total(), 2) << method;
  }
  EXPECT_EQ(Of(kAlways).outcomes[grpc::StatusCode::OK], 2);
  EXPECT_TRUE(Eventually([&] { return door_.gate()->in_flight() == 0; }));
}

TEST_P(DoorTest, ACallIsInFlightFromTheDoorToItsEnd) {
  Recorder recorder;
  std::atomic<UnaryCall*> taken{nullptr};
  unary_ = [&](UnaryCall* call) {
    call->SetReactor(&recorder);
    taken = call;
  };
  Start();
  EXPECT_EQ(door_.gate()->in_flight(), 0);
  std::thread caller([&] { EXPECT_TRUE(Call().ok()); });
  ASSERT_TRUE(Eventually([&] { return taken.load() != nullptr; }));
  EXPECT_EQ(door_.gate()->in_flight(), 1);
  EXPECT_EQ(Of(kUnary).total(), 0) << "it has no outcome yet";
  taken.load()->Answer(EmptyMessage());
  caller.join();
  ASSERT_TRUE(Eventually([&] { return door_.gate()->in_flight() == 0; }));
  EXPECT_EQ(recorder.dones, 1);
  Stop();
}

}  // namespace
}  // namespace awqd::transport
