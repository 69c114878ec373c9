// Limits of one connection: calls in flight, and answers that nobody reads.
#include "gmock/gmock.h"
#include "tests/server/raw_call.h"
#include "tests/server/small_windows.h"
#include "tests/server/transport/loop_fixture.h"

namespace awqd::transport {
namespace {

using ::testing::HasSubstr;

// Calls that end when the test ends them.
class CrowdTest : public LoopTest {
 protected:
  static constexpr int kMost = 3;
  CrowdTest()
      : CrowdTest({.calls_per_connection = kMost,
                   .reset = [this](const std::string& peer) { cut_.push_back(peer); }}) {}
  explicit CrowdTest(const AdmissionLimits& limits) : LoopTest(limits) {
    unary_ = [this](UnaryCall* call) {
      {
        MutexLock lock(&mu_);
        if (!over_) return held_.push_back(call);
      }
      call->Answer(EmptyMessage());
    };
  }
  void TearDown() override {
    {
      MutexLock lock(&mu_);
      over_ = true;
    }
    while (AnswerOne()) {
    }
    for (std::thread& caller : callers_) caller.join();
    Stop();
  }

  void Begin() { Begin(channel_); }
  void Begin(const std::shared_ptr<grpc::Channel>& channel) {
    callers_.emplace_back([this, channel] { EXPECT_TRUE(CallOn(channel, 60'000).ok()); });
  }
  size_t held() {
    MutexLock lock(&mu_);
    return held_.size();
  }
  bool AnswerOne() {
    UnaryCall* call = nullptr;
    {
      MutexLock lock(&mu_);
      if (held_.empty()) return false;
      call = held_.back();
      held_.pop_back();
    }
    call->Answer(EmptyMessage());
    return true;
  }
  // A channel with a connection of its own.
  std::shared_ptr<grpc::Channel> NewConnection() const {
    grpc::ChannelArguments apart;
    apart.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), apart);
  }
  grpc::Status CallOn(const std::shared_ptr<grpc::Channel>& channel, int limit_ms) {
    const auto stub = v1::QuantizedInference::NewStub(channel);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(limit_ms));
    v1::QuantizedMatmulResponse response;
    return stub->QuantizedMatmul(&context, {}, &response);
  }

  std::vector<std::string> cut_;  // filled by the refused call; there is one at a time
  Mutex mu_;
  std::vector<UnaryCall*> held_;
  bool over_ = false;
  std::vector<std::thread> callers_;
};

INSTANTIATE_TEST_SUITE_P(Threads, CrowdTest, ::testing::Values(1, 4));

TEST_P(CrowdTest, CallsPastTheMostOfAConnectionAreRefused) {
  Start();
  for (int i = 0; i < kMost; ++i) Begin();
  ASSERT_TRUE(Eventually([&] { return held() == kMost; }));
  for (const grpc::Status& refused : {Call(), CallAlways()}) {
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(refused.error_message(), HasSubstr("calls: got more than 3 in flight"));
  }
  EXPECT_EQ(held(), kMost) << "no handler has seen them";
  ASSERT_TRUE(AnswerOne());
  EXPECT_TRUE(Eventually([&] {
    return CallOn(channel_, 300).error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
  })) << "there is room again";
}

TEST_P(CrowdTest, WhoHeedsNoRefusalIsCutOnce) {
  Start();
  for (int i = 0; i < kMost; ++i) Begin();
  ASSERT_TRUE(Eventually([&] { return held() == kMost; }));
  for (int refused = 1; refused < 4 * kMost; ++refused) EXPECT_FALSE(Call().ok());
  EXPECT_TRUE(cut_.empty());
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(Call().ok());
  EXPECT_THAT(cut_, ::testing::ElementsAre(HasSubstr("127.0.0.1:")));
}

TEST_P(CrowdTest, AnotherConnectionIsNotTouched) {
  Start();
  for (int i = 0; i < kMost; ++i) Begin();
  ASSERT_TRUE(Eventually([&] { return held() == kMost; }));
  const auto other = NewConnection();
  EXPECT_TRUE(Eventually([&] {
    EXPECT_EQ(CallOn(other, 300).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
    return held() > kMost;
  })) << "it is let in";
}

// Two connections of one peer; each may have one call in any case.
class PeerCrowdTest : public CrowdTest {
 protected:
  PeerCrowdTest()
      : CrowdTest({.calls_per_connection = 100, .peer = {.few = 1, .per_peer = 6, .total = 100}}) {}
};

INSTANTIATE_TEST_SUITE_P(Threads, PeerCrowdTest, ::testing::Values(1, 4));

TEST_P(PeerCrowdTest, ConnectionsOfOnePeerShareItsCalls) {
  Start();
  for (int i = 0; i < 4; ++i) Begin();  // half of six, and the one
  ASSERT_TRUE(Eventually([&] { return held() == 4; }));
  for (const grpc::Status& refused : {Call(), CallAlways()}) {
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(refused.error_message(), HasSubstr("left to the others of its peer"));
  }
  const auto other = NewConnection();
  for (int i = 0; i < 2; ++i) Begin(other);
  ASSERT_TRUE(Eventually([&] { return held() == 6; }))
      << "they are let in, their neighbours notwithstanding";
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(AnswerOne());
  EXPECT_TRUE(Eventually([&] {
    return CallOn(channel_, 300).error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
  })) << "there is room again";
}

constexpr absl::Duration kTimeout = absl::Milliseconds(600);

class SlowClientTest : public LoopTest {
 protected:
  SlowClientTest() : LoopTest({.write_timeout = kTimeout}) {}
  grpc::ChannelArguments ChannelArguments() override { return SmallWindows(); }

  // A call whose answer is not read: flow control admits 64 KiB of it.
  std::unique_ptr<RawStream> StartUnread(const std::string& method) {
    auto call = std::make_unique<RawStream>(channel_, "/" + method);
    EXPECT_TRUE(call->Write("") && call->WritesDone());
    return call;
  }

  const grpc::Slice slice_{std::string(3 << 20, 'y')};
  const grpc::ByteBuffer large_{&slice_, 1};
};

INSTANTIATE_TEST_SUITE_P(Threads, SlowClientTest, ::testing::Values(1, 4));

TEST_P(SlowClientTest, AnAnswerThatIsNotTakenEndsItsCall) {
  Recorder recorder;
  std::atomic<bool> answered{false};
  unary_ = [&](UnaryCall* call) {
    call->SetReactor(&recorder);
    call->Answer(large_);
    answered = true;
  };
  Start();
  const absl::Time begin = absl::Now();
  const auto unread = StartUnread(kUnary);
  ASSERT_TRUE(Eventually([&] { return answered.load(); }));
  EXPECT_TRUE(Eventually([&] { return recorder.dones == 1; }));
  EXPECT_GE(absl::Now() - begin, kTimeout);
  EXPECT_EQ(recorder.cancels, 1);
  Stop();
}

TEST_P(SlowClientTest, AMessageThatIsNotTakenEndsItsStream) {
  Recorder recorder;
  write_ = [&](WriteCall* call) {
    call->SetReactor(&recorder);
    recorder.on_write = [call] { call->Finish(grpc::Status::OK); };
    call->StartWrite(large_);
  };
  Start();
  const auto unread = StartUnread(kWrite);
  EXPECT_TRUE(Eventually([&] { return recorder.dones == 1; }));
  EXPECT_EQ(recorder.failed_writes, 1);
  // gRPC returns the status of a call once all that arrived was read.
  std::string message;
  EXPECT_FALSE(unread->Read(&message)) << "a part of a message is none";
  EXPECT_EQ(unread->Finish().error_code(), grpc::StatusCode::CANCELLED);
  Stop();
}

TEST_P(SlowClientTest, WhoReadsIsNotTouchedHoweverLongTheCall) {
  Recorder recorder;
  std::atomic<WriteCall*> taken{nullptr};
  write_ = [&](WriteCall* call) {
    call->SetReactor(&recorder);
    taken = call;
  };
  Start();
  grpc::ClientContext context;
  const auto reader = stub_->DequantizeStream(&context, {});
  ASSERT_TRUE(Eventually([&] { return taken.load() != nullptr; }));
  v1::DequantizeChunk chunk;
  for (int i = 1; i <= 5; ++i) {
    taken.load()->StartWrite(EmptyMessage());
    EXPECT_TRUE(reader->Read(&chunk));
    ASSERT_TRUE(Eventually([&] { return recorder.writes == i; }));
    std::this_thread::sleep_for(absl::ToChronoMilliseconds(kTimeout / 3));
  }
  taken.load()->Finish(grpc::Status::OK);
  EXPECT_FALSE(reader->Read(&chunk));
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(Eventually([&] { return recorder.dones == 1; }));
  EXPECT_EQ(recorder.cancels, 0);
  Stop();
}

}  // namespace
}  // namespace awqd::transport
