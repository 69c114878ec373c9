// The loop and its calls, with handlers of the test's own on a real port: every order in which a
// call's events can come, and when what was submitted is run.
#include "server/transport/call_loop.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <new>
#include <string>
#include <thread>

#include "awqd/v1/inference.grpc.pb.h"
#include "gtest/gtest.h"
#include "server/wire/status.h"

namespace awqd::transport {
namespace {

using Inference = v1::QuantizedInference;
using RawInference =
    Inference::WithRawMethod_QuantizedMatmul<Inference::WithRawMethod_QuantizedMatmulStream<
        Inference::WithRawMethod_DequantizeStream<Inference::Service>>>;

// The bytes of an empty message, which every message type can be parsed from.
grpc::ByteBuffer EmptyMessage() {
  const grpc::Slice nothing("");
  return grpc::ByteBuffer(&nothing, 1);
}

// Counts what it hears; deleted by the test, so that a late event would be seen.
class Recorder final : public Reactor {
 public:
  void OnCancel() override {
    ++cancels;
    if (on_cancel) on_cancel();
  }
  void OnReadDone(bool ok) override {
    ok ? ++reads : ++failed_reads;
    if (on_read) on_read(ok);
  }
  void OnWriteDone(bool ok) override {
    ok ? ++writes : ++failed_writes;
    if (on_write) on_write();
  }
  void OnDone() override { ++dones; }

  std::function<void()> on_cancel, on_write;
  std::function<void(bool)> on_read;
  std::atomic<int> cancels{0}, reads{0}, failed_reads{0}, writes{0}, failed_writes{0}, dones{0};
};

class CallLoopTest : public testing::TestWithParam<int> {
 protected:
  // Serves with `run_queued`; the handlers are those that the test has set.
  void Start(
      std::function<bool()> run_queued = [] { return false; }, int slots = 2) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    loop_ = std::make_unique<CallLoop>(&builder, GetParam(), std::move(run_queued), wire::ToGrpc);
    loop_->Serve<UnaryCall>(slots, &service_, &RawInference::RequestQuantizedMatmul,
                            [this](UnaryCall* call) { unary_(call); });
    loop_->Serve<StreamCall>(slots, &service_, &RawInference::RequestQuantizedMatmulStream,
                             [this](StreamCall* call) { stream_(call); });
    loop_->Serve<WriteCall>(slots, &service_, &RawInference::RequestDequantizeStream,
                            [this](WriteCall* call) { write_(call); });
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    loop_->Start();
    stub_ = Inference::NewStub(grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                                                   grpc::InsecureChannelCredentials()));
  }

  // Every test ends with it, while what its handlers refer to exists.
  void Stop() {
    if (loop_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now());
    loop_->Stop();
    server_ = nullptr;
    loop_ = nullptr;
  }
  void TearDown() override { Stop(); }

  static bool Eventually(const std::function<bool()>& condition) {
    for (int i = 0; i < 2000 && !condition(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return condition();
  }

  grpc::Status Call() {
    grpc::ClientContext context;
    v1::QuantizedMatmulResponse response;
    return stub_->QuantizedMatmul(&context, {}, &response);
  }
  // Each of `threads` calls `times` times and is answered.
  void CallFromThreads(int threads, int times) {
    std::vector<std::thread> callers;
    for (int t = 0; t < threads; ++t) {
      callers.emplace_back([=, this] {
        for (int i = 0; i < times; ++i) EXPECT_TRUE(Call().ok());
      });
    }
    for (std::thread& caller : callers) caller.join();
  }

  RawInference service_;
  std::function<void(UnaryCall*)> unary_ = [](UnaryCall* call) { call->Answer(EmptyMessage()); };
  std::function<void(StreamCall*)> stream_ = [](StreamCall* call) {
    call->Finish(grpc::Status::OK);
  };
  std::function<void(WriteCall*)> write_ = [](WriteCall* call) { call->Finish(grpc::Status::OK); };
  std::unique_ptr<CallLoop> loop_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Inference::Stub> stub_;
};

INSTANTIATE_TEST_SUITE_P(Threads, CallLoopTest, testing::Values(1, 4));

TEST_P(CallLoopTest, AnswersAndErrorsReachTheClientWithAndWithoutAReactor) {
  Recorder recorder;
  std::atomic<int> calls{0};
  unary_ = [&](UnaryCall* call) {
    EXPECT_EQ(call->request()->Length(), 0u);
    if (++calls == 3) call->SetReactor(&recorder);
    if (calls == 2) return call->Finish({grpc::StatusCode::DATA_LOSS, "lost"});
    call->Answer(EmptyMessage());
  };
  Start();
  EXPECT_TRUE(Call().ok());
  EXPECT_EQ(Call().error_message(), "lost");
  EXPECT_TRUE(Call().ok());
  EXPECT_TRUE(Eventually([&] { return recorder.dones == 1; }));
  Stop();
  EXPECT_EQ(recorder.dones, 1);
  EXPECT_EQ(recorder.cancels, 0);
}

TEST_P(CallLoopTest, AHandlerThatThrowsEndsItsCallOnly) {
  std::atomic<int> calls{0};
  unary_ = [&](UnaryCall* call) {
    if (++calls == 1) throw std::bad_alloc();
    call->Answer(EmptyMessage());
  };
  Start();
  EXPECT_EQ(Call().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(Call().ok());
  Stop();
}

TEST_P(CallLoopTest, MoreCallsThanSlotsAreAllAnswered) {
  Start();
  CallFromThreads(16, 50);
  Stop();
}

TEST_P(CallLoopTest, ACancelIsHeardOnceAndTheCallStillHasToBeFinished) {
  Recorder recorder;
  std::atomic<UnaryCall*> taken{nullptr};
  unary_ = [&](UnaryCall* call) {
    call->SetReactor(&recorder);
    taken = call;
  };
  Start();
  grpc::ClientContext context;
  std::thread caller([&] {
    v1::QuantizedMatmulResponse response;
    EXPECT_EQ(stub_->QuantizedMatmul(&context, {}, &response).error_code(),
              grpc::StatusCode::CANCELLED);
  });
  ASSERT_TRUE(Eventually([&] { return taken.load() != nullptr; }));
  context.TryCancel();
  caller.join();
  ASSERT_TRUE(Eventually([&] { return recorder.cancels == 1; }));
  EXPECT_EQ(recorder.dones, 0);
  taken.load()->Answer(EmptyMessage());
  ASSERT_TRUE(Eventually([&] { return recorder.dones == 1; }));
  EXPECT_EQ(recorder.cancels, 1);
  Stop();
}

TEST_P(CallLoopTest, ACancelDuringTheHandlerIsHeardAfterIt) {
  Recorder recorder;
  std::atomic<bool> entered{false}, cancelled{false}, returned{false};
  unary_ = [&](UnaryCall* call) {
    call->SetReactor(&recorder);
    recorder.on_cancel = [&, call] {
      EXPECT_TRUE(returned);
      call->Finish({grpc::StatusCode::CANCELLED, ""});
    };
    entered = true;
    while (!cancelled) std::this_thread::yield();
    // Long enough for another thread of the loop to be told.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    returned = true;
  };
  Start();
  grpc::ClientContext context;
  std::thread caller([&] {
    v1::QuantizedMatmulResponse response;
    stub_->QuantizedMatmul(&context, {}, &response);
  });
  ASSERT_TRUE(Eventually([&] { return entered.load(); }));
  context.TryCancel();
  cancelled = true;
  caller.join();
  ASSERT_TRUE(Eventually([&] { return recorder.dones == 1; }));
  EXPECT_EQ(recorder.cancels, 1);
  Stop();
}

TEST_P(CallLoopTest, ADeadlineIsACancel) {
  Recorder recorder;
  std::atomic<UnaryCall*> taken{nullptr};
  unary_ = [&](UnaryCall* call) {
    call->SetReactor(&recorder);
    EXPECT_LT(call->deadline(), absl::Now() + absl::Seconds(5));
    taken = call;
  };
  recorder.on_cancel = [&] { taken.load()->Finish({grpc::StatusCode::CANCELLED, ""}); };
  Start();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  v1::QuantizedMatmulResponse response;
  EXPECT_EQ(stub_->QuantizedMatmul(&context, {}, &response).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([&] { return recorder.dones == 1; }));
  Stop();
}

TEST_P(CallLoopTest, AStreamReadsAndWritesAndIsDoneAfterItsLastRead) {
  Recorder recorder;
  grpc::ByteBuffer message;
  stream_ = [&](StreamCall* call) {
    call->SetReactor(&recorder);
    recorder.on_read = [&, call](bool ok) {
      if (ok) call->StartWrite(message);
    };
    recorder.on_write = [&, call] {
      // The next read is still out when the stream ends.
      call->StartRead(&message);
      if (recorder.writes == 2) call->Finish({grpc::StatusCode::ABORTED, "enough"});
    };
    call->StartRead(&message);
  };
  Start();
  grpc::ClientContext context;
  const auto stream = stub_->QuantizedMatmulStream(&context);
  v1::QuantizedMatmulRequest request;
  v1::QuantizedMatmulResponse response;
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(stream->Write(request));
    ASSERT_TRUE(stream->Read(&response));
  }
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_message(), "enough");
  ASSERT_TRUE(Eventually([&] { return recorder.dones == 1; }));
  EXPECT_EQ(recorder.reads, 2);
  EXPECT_EQ(recorder.failed_reads, 1);
  EXPECT_EQ(recorder.writes, 2);
  Stop();
}

TEST_P(CallLoopTest, AWriteToAClientThatIsGoneFails) {
  Recorder recorder;
  std::atomic<WriteCall*> taken{nullptr};
  write_ = [&](WriteCall* call) {
    call->SetReactor(&recorder);
    recorder.on_write = [&, call] { call->Finish({grpc::StatusCode::CANCELLED, ""}); };
    taken = call;
  };
  Start();
  grpc::ClientContext context;
  const auto reader = stub_->DequantizeStream(&context, {});
  ASSERT_TRUE(Eventually([&] { return taken.load() != nullptr; }));
  context.TryCancel();
  ASSERT_TRUE(Eventually([&] { return recorder.cancels == 1; }));
  taken.load()->StartWrite(EmptyMessage());
  EXPECT_FALSE(reader->Finish().ok());
  ASSERT_TRUE(Eventually([&] { return recorder.dones == 1; }));
  EXPECT_EQ(recorder.failed_writes, 1);
  Stop();
}

TEST_P(CallLoopTest, WhatHandlersSubmitIsRunUntilNothingIsLeft) {
  EXPECT_FALSE(CallLoop::WillRunQueued()) << "this is no thread of a loop";
  Mutex mu;
  std::vector<UnaryCall*> queue;
  std::atomic<int> runs{0};
  unary_ = [&](UnaryCall* call) {
    EXPECT_TRUE(CallLoop::WillRunQueued());
    MutexLock lock(&mu);
    queue.push_back(call);
  };
  Start([&] {
    ++runs;
    MutexLock lock(&mu);
    if (queue.empty()) return false;
    queue.back()->Answer(EmptyMessage());
    queue.pop_back();
    return !queue.empty();
  });
  CallFromThreads(4, 100);
  EXPECT_GE(runs, 400);
  Stop();
}

TEST_P(CallLoopTest, StopWaitsForCallsInProgress) {
  Recorder recorder;
  std::atomic<UnaryCall*> taken{nullptr};
  unary_ = [&](UnaryCall* call) {
    call->SetReactor(&recorder);
    taken = call;
  };
  Start();
  std::thread caller([&] { EXPECT_FALSE(Call().ok()); });
  ASSERT_TRUE(Eventually([&] { return taken.load() != nullptr; }));
  std::atomic<bool> stopped{false};
  std::thread stop([&] {
    Stop();
    stopped = true;
  });
  ASSERT_TRUE(Eventually([&] { return recorder.cancels == 1; }));
  EXPECT_FALSE(stopped);
  taken.load()->Finish({grpc::StatusCode::CANCELLED, ""});
  stop.join();
  caller.join();
  EXPECT_EQ(recorder.dones, 1);
}

class CallLoopOfOneThreadTest : public CallLoopTest {};
INSTANTIATE_TEST_SUITE_P(Threads, CallLoopOfOneThreadTest, testing::Values(1));

// What came together is run together. The thread is held in its first handler so that the other
// requests can come; how long that takes nobody knows, so it is held longer each time.
TEST_P(CallLoopOfOneThreadTest, EverythingThatIsThereIsTakenBeforeAnythingIsRun) {
  constexpr size_t kCalls = 8;
  std::vector<UnaryCall*> queue;  // of the loop's thread
  std::atomic<size_t> largest{0};
  std::atomic<bool> hold{false};
  std::chrono::milliseconds held(5);
  unary_ = [&](UnaryCall* call) {
    if (hold.exchange(false)) std::this_thread::sleep_for(held);
    CallLoop::WillRunQueued();
    queue.push_back(call);
  };
  Start(
      [&] {
        largest = std::max(largest.load(), queue.size());
        for (UnaryCall* call : queue) call->Answer(EmptyMessage());
        queue.clear();
        return false;
      },
      kCalls);
  for (; largest < kCalls && held < std::chrono::seconds(10); held *= 2) {
    hold = true;
    CallFromThreads(kCalls, 1);
  }
  Stop();
  EXPECT_EQ(largest, kCalls);
}

}  // namespace
}  // namespace awqd::transport
