// QuantizeKv and DequantizeKv: one block, one message, no weight.
#include <memory>
#include <utility>
#include <vector>

#include "kernels/base/status.h"
#include "server/services/request_handler.h"
#include "server/services/services.h"
#include "server/transport/call_loop.h"
#include "server/wire/kv_wire.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

struct QuantizeKvMethod {
  using Request = v1::QuantizeKvRequest;
  using Response = v1::QuantizeKvResponse;
  using Job = wire::QuantizeKvJob;
  using Work = engine::Kv4StoreWork;
  static constexpr absl::string_view kName = "QuantizeKv";
  static constexpr int kFirstField = Response::kCodesFieldNumber;
  // Where the bytes of the job belong in its work.
  template <typename Stage>
  static absl::Status StageAll(Job& job, Stage stage) {
    AWQD_RETURN_IF_ERROR(stage(job.x, &job.work.x));
    AWQD_RETURN_IF_ERROR(stage(job.scale, &job.work.given_scale));
    return stage(job.zero, &job.work.given_zero);
  }
};

struct DequantizeKvMethod {
  using Request = v1::DequantizeKvRequest;
  using Response = v1::DequantizeKvResponse;
  using Job = wire::DequantizeKvJob;
  using Work = engine::Kv4LoadWork;
  static constexpr absl::string_view kName = "DequantizeKv";
  static constexpr int kFirstField = Response::kOutputFieldNumber;
  template <typename Stage>
  static absl::Status StageAll(Job& job, Stage stage) {
    AWQD_RETURN_IF_ERROR(stage(job.codes, &job.work.codes));
    AWQD_RETURN_IF_ERROR(stage(job.scale, &job.work.scale));
    return stage(job.zero, &job.work.zero);
  }
};

// Shared between gRPC, until OnDone, and what is still to come back.
template <typename Method>
class KvCall final : public Flow, public transport::Reactor {
 public:
  KvCall(const Env& env, transport::UnaryCall* call)
      : Flow(env, Method::kName, call), call_(call) {}

  void Start() {
    self_ = shared_from_this();
    call_->SetReactor(this);
    Try([&]() -> absl::Status {
      AWQD_RETURN_IF_ERROR(StillWanted());
      return Open(call_->request(), &request_, [this] { return OnMessage(); });
    });
  }
  void OnCancel() override { Cancel(); }
  void OnDone() override { const std::shared_ptr<Flow> last = std::move(self_); }

 private:
  absl::Status OnMessage() {
    AWQD_ASSIGN_OR_RETURN(job_,
                          wire::BuildKv(&request_, env_.options.transport.max_send_message_bytes));
    AWQD_RETURN_IF_ERROR(lease_.Grow(wire::AnswerBytes(job_), "output"));
    return Stage();
  }
  // Copies the payloads and submits the work.
  absl::Status Stage() {
    engine::StagingPool& staging = env_.engine->staging();
    AWQD_RETURN_IF_ERROR(
        Method::StageAll(job_, [&](std::string& bytes, engine::Payload* out) -> absl::Status {
          if (bytes.empty()) return absl::OkStatus();
          const auto size = static_cast<int64_t>(bytes.size());
          AWQD_ASSIGN_OR_RETURN(*out, staging.Get(size));
          bytes.copy(out->data(), bytes.size());
          staging.CountCopy(size);
          bytes = std::string();  // its memory too
          return absl::OkStatus();
        }));
    log_.tokens = job_.work.shape.tokens;
    auto work = std::make_unique<typename Method::Work>(job_.work);
    job_.work.FreeInputs();  // the engine's copy alone holds them
    auto done = [this, self = shared_from_this()](const absl::Status& status,
                                                  const engine::Payload& result,
                                                  const engine::ExecutionReport& report) {
      if (settled()) return;
      Try([&]() -> absl::Status {
        AWQD_RETURN_IF_ERROR(status);
        report_ = report;
        log_.bytes_out = result.size();
        Answer(result);
        return absl::OkStatus();
      });
    };
    return Submit(std::move(work),
                  {.priority = request_.priority(),
                   .deadline = deadline_,
                   .caller_runs = transport::CallLoop::WillRunQueued()},
                  std::move(done));
  }

  void Answer(const engine::Payload& result) {
    std::vector<int64_t> shape;
    wire::Answer first;
    typename Method::Response response = wire::ResponseOf(job_, result, &shape, &first);
    wire::FillExecution(report_, response.mutable_execution());
    response.set_request_id(request_.request_id());
    answer_ = wire::Encode(response, Method::kFirstField, first, &env_.engine->staging());
    Settle(absl::OkStatus());
  }

  void Log(const absl::Status& status) override { LogOf(request_.request_id(), {}, status); }
  void End(const absl::Status& status) override {
    status.ok() ? call_->Answer(answer_) : call_->Finish(wire::ToGrpc(status));
  }

  transport::UnaryCall* const call_;
  typename Method::Request request_;
  typename Method::Job job_;
  grpc::ByteBuffer answer_;
  std::shared_ptr<Flow> self_;  // gRPC's share
};

template <typename Method>
void Start(const Env& env, transport::UnaryCall* call) {
  std::make_shared<KvCall<Method>>(env, call)->Start();
}

}  // namespace

void StartQuantizeKv(const Env& env, transport::UnaryCall* call) {
  Start<QuantizeKvMethod>(env, call);
}

void StartDequantizeKv(const Env& env, transport::UnaryCall* call) {
  Start<DequantizeKvMethod>(env, call);
}

}  // namespace awqd::services
