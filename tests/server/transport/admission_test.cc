// Admission: each kind of call passes it, and what it counts of a call that has ended.
#include "server/transport/admission.h"

#include "gmock/gmock.h"
#include "tests/server/method_outcomes.h"
#include "tests/server/raw_call.h"
#include "tests/server/transport/loop_fixture.h"

namespace awqd::transport {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class AdmissionTest : public LoopTest {
 protected:
  // The counts of `method`.
  obs::MethodStats Of(absl::string_view method) const {
    for (obs::MethodStats& calls : admission_.Calls()) {
      if (calls.method == method) return std::move(calls);
    }
    ADD_FAILURE() << method << " is not in the table";
    return {};
  }

  // One message of `bytes` to a method of any kind, and how the call ends.
  grpc::Status Send(const std::string& method, size_t bytes) {
    return RawCall(channel_, "/" + method, std::string(bytes, 'x'));
  }
};

INSTANTIATE_TEST_SUITE_P(Threads, AdmissionTest, ::testing::Values(1, 4));

TEST_P(AdmissionTest, KnowsEveryMethodFromItsOwnTable) {
  Start();
  std::vector<std::string> methods;
  for (const obs::MethodStats& calls : admission_.Calls()) methods.push_back(calls.method);
  EXPECT_THAT(methods, ElementsAre(Admission::kUnknownMethod, kUnary, kStream, kWrite, kAlways));
  EXPECT_THAT(admission_.Services(), ElementsAre("awqd.v1.QuantizedInference"));
}

TEST_P(AdmissionTest, AHandlerMeetsCallsOfItsMethodFromAPeer) {
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
  EXPECT_TRUE(CallAlways().ok());
  MutexLock lock(&mu);
  EXPECT_THAT(methods, ElementsAre(kUnary, kAlways));
}

TEST_P(AdmissionTest, CountsByMethodAndOutcomeOnce) {
  std::atomic<grpc::StatusCode> code{grpc::StatusCode::OK};
  unary_ = [&](UnaryCall* call) {
    code == grpc::StatusCode::OK ? call->Answer(EmptyMessage()) : call->Finish({code, "no"});
  };
  Start();
  for (int i = 0; i < obs::MethodStats::kCodes; ++i) {
    code = static_cast<grpc::StatusCode>(i);
    for (int times = 0; times <= i; ++times) EXPECT_EQ(Call().error_code(), code);
  }
  const obs::MethodStats calls = Of(kUnary);
  for (int i = 0; i < obs::MethodStats::kCodes; ++i) EXPECT_EQ(OutcomesOf(calls)[i], i + 1) << i;
  EXPECT_EQ(EndedCalls(calls), 17 * 18 / 2);
  EXPECT_EQ(EndedCalls(Of(kAlways)), 0);
}

// Only calls of a method that queues work for a device ask whether the devices are busy.
TEST_P(AdmissionTest, ABusyServerRejectsCallsUnreadByTheirDeadline) {
  unary_ = [](UnaryCall* call) { call->Answer(EmptyMessage()); };
  std::atomic<bool> busy{false};
  admission_.SetBusyCheck([&](absl::Time deadline) {
    return busy && deadline < absl::Now() + absl::Minutes(1)
               ? absl::ResourceExhaustedError("too much to do")
               : absl::OkStatus();
  });
  Start();
  busy = true;
  EXPECT_TRUE(Send(kUnary, 1 << 20).ok());
  admission_.RejectWhileBusy(kUnary);
  const grpc::Status rejected = Send(kUnary, 1 << 20);
  EXPECT_EQ(rejected.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(rejected.error_message(), "too much to do");
  EXPECT_EQ(Of(kUnary).received_bytes.sum, int64_t{1} << 20);
  EXPECT_TRUE(Call().ok());  // without a deadline
  EXPECT_TRUE(CallAlways().ok());
}

// Receiving and sending may take longer than a deadline leaves, whatever the devices do.
TEST_P(AdmissionTest, CallsWhoseAnswersWouldLeaveTooLateAreRejectedUnread) {
  std::atomic<int> handled{0};
  unary_ = [&](UnaryCall* call) {
    ++handled;
    call->Answer(EmptyMessage());
  };
  Start();
  admission_.RejectWhileBusy(kUnary);
  const auto call = [this](int limit_ms) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(limit_ms));
    v1::QuantizedMatmulResponse response;
    return stub_->QuantizedMatmul(&context, {}, &response);
  };
  EXPECT_TRUE(call(10'000).ok()) << "nothing is known";
  // An answer is on its way, and such take a minute.
  TransitStage& sending = admission_.transit()->sending;
  ASSERT_TRUE(Eventually([&] {
    return sending.Expect(std::chrono::steady_clock::now()) > absl::ZeroDuration();
  })) << "the first call is gone";
  const auto now = std::chrono::steady_clock::now();
  for (int i = 0; i < 100; ++i) {
    sending.Enter();
    sending.Leave(now - std::chrono::minutes(1), now, true);
  }
  sending.Enter();
  for (int i = 0; i < 15; ++i) {
    const grpc::Status status = call(10'000);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(status.error_message(), ::testing::HasSubstr("send an answer"));
  }
  EXPECT_EQ(handled, 1) << "none was read";
  EXPECT_TRUE(call(10'000).ok()) << "one in 16 is let in";
  EXPECT_TRUE(Eventually([&] { return call(10'000).ok(); })) << "it was a sign of better times";
  EXPECT_TRUE(Call().ok()) << "without a deadline";
  EXPECT_TRUE(CallAlways().ok());
}

TEST_P(AdmissionTest, AStatusThatGrpcDoesNotHaveIsUnknown) {
  unary_ = [](UnaryCall* call) { call->Finish({grpc::StatusCode::DO_NOT_USE, ""}); };
  Start();
  EXPECT_FALSE(Call().ok());
  EXPECT_EQ(OutcomesOf(Of(kUnary))[grpc::StatusCode::UNKNOWN], 1);
  EXPECT_EQ(EndedCalls(Of(kUnary)), 1);
}

TEST_P(AdmissionTest, AHandlerThatThrowsIsCounted) {
  unary_ = [](UnaryCall*) { throw std::bad_alloc(); };
  Start();
  EXPECT_FALSE(Call().ok());
  EXPECT_EQ(OutcomesOf(Of(kUnary))[grpc::StatusCode::RESOURCE_EXHAUSTED], 1);
  EXPECT_EQ(EndedCalls(Of(kUnary)), 1);
}

TEST_P(AdmissionTest, CountsTheBytesOfMessagesAndTheTimeInside) {
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
    const obs::MethodStats calls = Of(method);
    EXPECT_EQ(OutcomesOf(calls)[grpc::StatusCode::OK], 1) << method;
    EXPECT_EQ(calls.received_bytes.sum, 50000) << method;
    EXPECT_EQ(calls.sent_bytes.sum, 70) << method;
    EXPECT_GT(calls.durations_ns[grpc::StatusCode::OK].sum, 0) << method;
  }
  EXPECT_GE(Of(kUnary).durations_ns[grpc::StatusCode::OK].sum, 2'000'000);
  ASSERT_TRUE(Eventually([&] { return writer.dones == 1 && reader.dones == 1; }));
  Stop();
}

TEST_P(AdmissionTest, UnknownMethodsPassItUnderOneName) {
  Start();
  for (const char* method :
       {"awqd.v1.QuantizedInference/Nope", "no.Service/Nope", "x", "(unknown)"}) {
    const grpc::Status status = Send(method, 10);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_THAT(status.error_message(), HasSubstr(std::string("method: got \"/") + method + "\""));
  }
  EXPECT_EQ(OutcomesOf(Of(Admission::kUnknownMethod))[grpc::StatusCode::UNIMPLEMENTED], 4);
  EXPECT_EQ(admission_.Calls().size(), 5u) << "names from the wire take no memory";
}

TEST_P(AdmissionTest, ADrainRejectsEveryKindOfCallBeforeItsHandler) {
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
  const std::vector<std::string> rejected = {kUnary, kStream, kWrite, "no.Service/Nope"};
  admission_.drain()->HoldNewCalls();
  std::vector<std::thread> waiting;
  for (const std::string& method : rejected) {
    waiting.emplace_back([&, method] {
      EXPECT_EQ(Send(method, 0).error_message(), Drain::UnavailableStatus().error_message())
          << method;
    });
  }
  ASSERT_TRUE(Eventually([&] { return admission_.drain()->rejected() == 4; }));
  EXPECT_EQ(admission_.drain()->in_flight(), 4) << "they wait";
  EXPECT_TRUE(Send(kAlways, 0).ok());
  EXPECT_EQ(admission_.drain()->in_flight(), 4) << "one that is served anyhow holds nothing back";
  EXPECT_EQ(handled.exchange(0), 1);
  admission_.drain()->RejectNewCalls();
  for (std::thread& caller : waiting) caller.join();
  for (const std::string& method : rejected) {
    EXPECT_EQ(Send(method, 0).error_code(), grpc::StatusCode::UNAVAILABLE) << method;
  }
  EXPECT_TRUE(Send(kAlways, 0).ok());
  EXPECT_EQ(handled, 1);
  for (const absl::string_view method : {absl::string_view(kUnary), absl::string_view(kStream),
                                         absl::string_view(kWrite), Admission::kUnknownMethod}) {
    EXPECT_EQ(OutcomesOf(Of(method))[grpc::StatusCode::UNAVAILABLE], 2) << method;
    EXPECT_EQ(EndedCalls(Of(method)), 2) << method;
  }
  EXPECT_EQ(OutcomesOf(Of(kAlways))[grpc::StatusCode::OK], 2);
  EXPECT_TRUE(Eventually([&] { return admission_.drain()->in_flight() == 0; }));
}

TEST_P(AdmissionTest, ACallIsInFlightFromItsArrivalToItsEnd) {
  Recorder recorder;
  std::atomic<UnaryCall*> taken{nullptr};
  unary_ = [&](UnaryCall* call) {
    call->SetReactor(&recorder);
    taken = call;
  };
  Start();
  EXPECT_EQ(admission_.drain()->in_flight(), 0);
  std::thread caller([&] { EXPECT_TRUE(Call().ok()); });
  ASSERT_TRUE(Eventually([&] { return taken.load() != nullptr; }));
  EXPECT_EQ(admission_.drain()->in_flight(), 1);
  EXPECT_EQ(EndedCalls(Of(kUnary)), 0) << "it has no outcome yet";
  taken.load()->Answer(EmptyMessage());
  caller.join();
  ASSERT_TRUE(Eventually([&] { return admission_.drain()->in_flight() == 0; }));
  EXPECT_EQ(recorder.dones, 1);
  Stop();
}

}  // namespace
}  // namespace awqd::transport
