// The loop and its calls on a real port, with handlers of the test: every order of a call's events,
// and when submitted work is run.
#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <new>

#include "tests/server/transport/loop_fixture.h"

namespace awqd::transport {
namespace {

using CallLoopTest = LoopTest;

INSTANTIATE_TEST_SUITE_P(Threads, CallLoopTest, ::testing::Values(1, 4));

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
    // Long enough for another thread of the loop to be notified.
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

TEST_P(CallLoopTest, ACallIsInFlightFromItsHeadersOnAndItsHandlerRunsWithTheRequest) {
  std::atomic<int> handled{0};
  unary_ = [&](UnaryCall* call) {
    ++handled;
    call->Answer(EmptyMessage());
  };
  Start();
  grpc::GenericStub stub(channel_);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const auto next = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  const auto call = stub.PrepareCall(&context, std::string("/") + kUnary, &queue);
  call->StartCall(nullptr);
  ASSERT_TRUE(next());
  ASSERT_TRUE(Eventually([&] { return admission_.drain()->in_flight() == 1; }));
  EXPECT_EQ(handled, 0);
  call->Write(EmptyMessage(), nullptr);
  ASSERT_TRUE(next());
  grpc::ByteBuffer answer;
  call->Read(&answer, nullptr);
  EXPECT_TRUE(next());
  EXPECT_EQ(handled, 1);
  grpc::Status status;
  call->Finish(&status, nullptr);
  next();
  EXPECT_TRUE(status.ok()) << status.error_message();
  Stop();
}

TEST_P(CallLoopTest, ACallThatBreaksOffBeforeItsRequestRunsNoHandler) {
  std::atomic<int> handled{0};
  unary_ = [&](UnaryCall* call) {
    ++handled;
    call->Answer(EmptyMessage());
  };
  Start();
  {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    void* tag = nullptr;
    bool ok = false;
    const auto call = stub.PrepareCall(&context, std::string("/") + kUnary, &queue);
    call->StartCall(nullptr);
    ASSERT_TRUE(queue.Next(&tag, &ok));
    ASSERT_TRUE(Eventually([&] { return admission_.drain()->in_flight() == 1; }));
    context.TryCancel();
    grpc::Status status;
    call->Finish(&status, nullptr);
    queue.Next(&tag, &ok);
  }
  EXPECT_TRUE(Eventually([&] { return admission_.drain()->in_flight() == 0; }));
  EXPECT_EQ(handled, 0);
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
      // The next read is still pending when the stream ends.
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

TEST_P(CallLoopTest, WithoutGatheringOnlyALoneCallIsRun) {
  std::atomic<UnaryCall*> first{nullptr};
  std::atomic<int> runs{0};
  unary_ = [&](UnaryCall* call) {
    if (first.load() == nullptr) {
      EXPECT_TRUE(CallLoop::WillRunQueued());
      first = call;
      return;
    }
    EXPECT_FALSE(CallLoop::WillRunQueued()) << "another call is in flight";
    call->Answer(EmptyMessage());
  };
  Start([&] { return ++runs < 0; }, 2, /*gathers=*/false);
  std::thread caller([&] { EXPECT_TRUE(Call().ok()); });
  ASSERT_TRUE(Eventually([&] { return runs == 1; }));
  EXPECT_TRUE(Call().ok());
  EXPECT_EQ(runs, 1);
  first.load()->Answer(EmptyMessage());
  caller.join();
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

class CallLoopOfOneThreadTest : public LoopTest {};
INSTANTIATE_TEST_SUITE_P(Threads, CallLoopOfOneThreadTest, ::testing::Values(1));

TEST_P(CallLoopOfOneThreadTest, TheLongestHoldIsSeen) {
  constexpr std::chrono::milliseconds kHold(60);
  const auto processor_time = [] {
    timespec time = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  };
  std::atomic<bool> hold{false};
  unary_ = [&](UnaryCall* call) {
    for (const auto begin = processor_time(); hold && processor_time() - begin < kHold;) {
    }
    call->Answer(EmptyMessage());
  };
  Start();
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(Call().ok());
  EXPECT_LT(loop_->longest_events().Longest().processor, absl::FromChrono(kHold));
  hold = true;
  EXPECT_TRUE(Call().ok());
  hold = false;
  // The client may have its answer before the event is over.
  // The measuring clock turns every ten milliseconds at most.
  const absl::Duration least = absl::FromChrono(kHold) * 2 / 3;
  for (int i = 0; i < 1000 && loop_->longest_events().Longest().wall < least; ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_GE(loop_->longest_events().Longest().processor, least);
  EXPECT_GE(loop_->longest_events().Longest().wall, least);
  Stop();
}

// Requests that arrive together are run together. The thread is held in its first handler so that
// the other requests can arrive; it is held longer each time, because their delay is unknown.
TEST_P(CallLoopOfOneThreadTest, EverythingThatIsThereIsTakenBeforeAnythingIsRun) {
  constexpr size_t kCalls = 8;
  std::vector<UnaryCall*> queue;  // used by the loop's thread
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
