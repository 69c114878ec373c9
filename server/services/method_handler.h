// MethodHandler: a request of one method, from message to answer, in whichever protocol it came.
#pragma once

#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/services/methods.h"
#include "server/services/request_handler.h"

namespace awqd::services {

// The steps, each of which continues with the next: admit and parse the message, validate the
// request, find its weights (load or pack them on another thread), build and stage the job, submit
// it, encode the answer. `Method` is one of methods.h.
template <typename Method>
class MethodHandler : public RequestHandler {
 public:
  using Request = typename Method::Request;
  using Lookup = typename Method::Lookup;
  using Weights = typename Method::Weights;
  using Job = typename Method::Job;

  MethodHandler(const Env& env, absl::string_view method, transport::ServerCall* call,
                std::unique_ptr<Codec<Request>> codec, Done done);

  absl::string_view request_id() const override;

 protected:
  // Stages the payloads of a job, and submits it. The weights are found by now.
  virtual absl::Status RunJob(Job job);
  void SendEnd(const absl::Status& status) override;
  // Frees the request except for what the answer and the log repeat.
  void ForgetRequest();

 private:
  absl::Status Begin(grpc::ByteBuffer* message, const transport::Drain* gate) override;
  absl::Status ParseAndValidate();
  absl::Status OpenSharedMemory();
  // Continues with UseWeights: at once with loaded weights, on another thread with inline ones and
  // those of an unloaded model.
  absl::Status FindWeights();
  absl::Status OnLoaded(const absl::Status& loaded);
  template <typename Packed>
  absl::Status PackWeights(const Packed& packed);
  absl::Status UseWeights(Weights weights);
  absl::StatusOr<engine::Payload> StageInput(const typename Job::Input& input);
  void OnResult(const absl::Status& status, const engine::Payload& result,
                const engine::ExecutionReport& report);
  void SendAnswer(const absl::Status& status, const engine::Payload& result);
  void Log(const absl::Status& status) override {
    LogEnd(parsed_.request.request_id(), Lookup::Name(parsed_.request), status);
  }
  absl::Status EncodeError(const absl::Status& status) const override {
    return codec_->EncodeError(status);
  }
  void CloseSharedMemory();
  // Bytes of the activations, where they are not in parsed_.request.
  std::optional<int64_t> cut_bytes() const;

  const std::unique_ptr<Codec<Request>> codec_;
  Done done_;
  wire::ParsedRequest<Request> parsed_;
  SharedRange shared_input_;   // until it was staged
  SharedRange shared_output_;  // until the answer was written there
  wire::AnswerForm form_;
  grpc::ByteBuffer answer_;
};

}  // namespace awqd::services
