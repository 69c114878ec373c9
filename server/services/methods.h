// DequantizeFlow: one request for a weight, or a block of it, from message to answer; and what
// DequantizeStream does alike.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/services/codec.h"
#include "server/services/request_flow.h"
#include "server/services/weight_lookup.h"
#include "server/wire/validation.h"

namespace awqd::services {

using DequantizeCodec = Codec<v1::DequantizeRequest>;

// What both do until blocks run: check, find the weight, resolve the ranges.
class DequantizeSteps : public RequestFlow {
 public:
  absl::string_view request_id() const override;

 protected:
  using BlockDone = std::function<absl::Status(const engine::Payload& result)>;

  DequantizeSteps(const Env& env, absl::string_view method, transport::ServerCall* call,
                  std::unique_ptr<DequantizeCodec> codec)
      : RequestFlow(env, method, call), codec_(std::move(codec)) {}

  // What the answer will hold at a time counts until the flow ends.
  absl::Status Reserve(int64_t rows);
  // Runs `rows` rows of the job from `row_begin` on, then `done` on a worker thread.
  absl::Status SubmitBlock(int64_t row_begin, int64_t rows, BlockDone done);

  // The ranges are resolved: job_.work is the whole answer.
  virtual absl::Status OnJob() = 0;
  // Opens, or refuses, the shared memory that the request names.
  virtual absl::Status OpenShared() = 0;
  // Answers. Called once.
  virtual void Finish(const absl::Status& status) = 0;

  const std::unique_ptr<DequantizeCodec> codec_;
  v1::DequantizeRequest request_;
  wire::DequantizeJob job_;

 private:
  absl::Status Begin(grpc::ByteBuffer* message, const transport::CallGate* gate) override;
  absl::Status OnMessage();
  absl::Status OnWeight(WeightPtr weight);
  void Add(const engine::ExecutionReport& block, int64_t bytes);
  void Log(const absl::Status& status) override {
    LogOf(request_.request_id(), OneWeight::Name(request_), status);
  }
  void End(const absl::Status& status) override;
  absl::Status Spelled(const absl::Status& status) const override {
    return codec_->Spelled(status);
  }
};

// The answer in one message, or in shared memory.
class DequantizeFlow final : public DequantizeSteps {
 public:
  DequantizeFlow(const Env& env, absl::string_view method, transport::ServerCall* call,
                 std::unique_ptr<DequantizeCodec> codec, Done done)
      : DequantizeSteps(env, method, call, std::move(codec)), done_(std::move(done)) {}

 private:
  absl::Status OnJob() override;
  absl::Status OnResult(const engine::Payload& result);
  // `written`: where the result is, unless it is to be sent.
  absl::Status Answer(const engine::Payload& result, const v1::SharedMemory* written);
  absl::Status OpenShared() override;
  void Finish(const absl::Status& status) override;

  Done done_;
  grpc::ByteBuffer answer_;
  SharedRange shared_out_;
};

}  // namespace awqd::services
