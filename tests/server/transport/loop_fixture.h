// LoopTest: a loop behind admission on a real port, with handlers of the test's own.
#pragma once

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "awqd/v1/inference.grpc.pb.h"
#include "gtest/gtest.h"
#include "server/transport/admission.h"
#include "server/transport/call_loop.h"
#include "server/wire/status.h"
#include "tests/testing/eventually.h"

namespace awqd::transport {

// The bytes of an empty message, which every message type can be parsed from.
inline grpc::ByteBuffer EmptyMessage() {
  const grpc::Slice nothing("");
  return grpc::ByteBuffer(&nothing, 1);
}

// Counts its events. The test deletes it, so that a late event would be noticed.
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

// A method of each kind, on a loop with the parameter's number of threads.
class LoopTest : public ::testing::TestWithParam<int> {
 protected:
  explicit LoopTest(const AdmissionLimits& limits = {}) : admission_(limits) {}

  static constexpr char kUnary[] = "awqd.v1.QuantizedInference/QuantizedMatmul";
  static constexpr char kStream[] = "awqd.v1.QuantizedInference/QuantizedMatmulStream";
  static constexpr char kWrite[] = "awqd.v1.QuantizedInference/DequantizeStream";
  // Answered like kUnary, also while the server drains.
  static constexpr char kAlways[] = "awqd.v1.QuantizedInference/Dequantize";

  // Serves with `run_queued` and the handlers that the test has set.
  void Start(
      std::function<bool()> run_queued = [] { return false; }, int slots = 2, bool gathers = true) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    loop_ = std::make_unique<CallLoop>(&builder, &admission_, GetParam(), std::move(run_queued),
                                       wire::ToGrpc, gathers);
    loop_->Serve<UnaryCall>(kUnary, security::Need::kInfer, slots,
                            [this](UnaryCall* call) { unary_(call); });
    loop_->Serve<StreamCall>(kStream, security::Need::kInfer, slots,
                             [this](StreamCall* call) { stream_(call); });
    loop_->Serve<WriteCall>(kWrite, security::Need::kInfer, slots,
                            [this](WriteCall* call) { write_(call); });
    loop_->Serve<UnaryCall>(kAlways, security::Need::kHealth, slots,
                            [this](UnaryCall* call) { unary_(call); });
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    loop_->Start();
    address_ = "127.0.0.1:" + std::to_string(port);
    channel_ =
        grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), ChannelArguments());
    stub_ = v1::QuantizedInference::NewStub(channel_);
  }

  // The arguments of the test's channel.
  virtual grpc::ChannelArguments ChannelArguments() { return {}; }

  // Every test ends with this, while the objects of its handlers exist.
  void Stop() {
    if (loop_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now());
    loop_->Stop();
    server_ = nullptr;
    loop_ = nullptr;
  }
  void TearDown() override { Stop(); }

  grpc::Status Call() {
    grpc::ClientContext context;
    v1::QuantizedMatmulResponse response;
    return stub_->QuantizedMatmul(&context, {}, &response);
  }
  grpc::Status CallAlways() {
    grpc::ClientContext context;
    v1::DequantizeResponse response;
    return stub_->Dequantize(&context, {}, &response);
  }
  // Each of `threads` threads makes `times` calls, which must be answered.
  void CallFromThreads(int threads, int times) {
    std::vector<std::thread> callers;
    for (int t = 0; t < threads; ++t) {
      callers.emplace_back([=, this] {
        for (int i = 0; i < times; ++i) EXPECT_TRUE(Call().ok());
      });
    }
    for (std::thread& caller : callers) caller.join();
  }

  Admission admission_;
  std::function<void(UnaryCall*)> unary_ = [](UnaryCall* call) { call->Answer(EmptyMessage()); };
  std::function<void(StreamCall*)> stream_ = [](StreamCall* call) {
    call->Finish(grpc::Status::OK);
  };
  std::function<void(WriteCall*)> write_ = [](WriteCall* call) { call->Finish(grpc::Status::OK); };
  std::unique_ptr<CallLoop> loop_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::QuantizedInference::Stub> stub_;
};

}  // namespace awqd::transport
