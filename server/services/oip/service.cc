// One line for each method: how it is named, what it asks of its callers, who answers.
#include "server/services/oip/service.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/services/oip/metadata.h"
#include "server/services/oip/oip_codec.h"
#include "server/services/oip/repository.h"
#include "server/services/oip/shared_regions.h"
#include "server/services/call_handlers.h"
#include "server/services/unary.h"

namespace awqd::services::oip {
namespace {

using security::Need;
using transport::CallLoop, transport::ServerCall, transport::StreamCall, transport::UnaryCall;
using transport::Guarded, transport::WhileDraining;

std::string Path(absl::string_view method) {
  return absl::StrCat(inference::ModelInferRequest::descriptor()->file()->service(0)->full_name(),
                      "/", method);
}

absl::Status IsLive(const Env&, const inference::ServerLiveRequest&,
                    inference::ServerLiveResponse* response) {
  response->set_live(true);
  return absl::OkStatus();
}

absl::Status IsReady(const Env& env, const inference::ServerReadyRequest&,
                     inference::ServerReadyResponse* response) {
  response->set_ready(env.ready());
  return absl::OkStatus();
}

std::string OwnerOf(const ServerCall& call) {
  return call.identity() == nullptr ? "" : call.identity()->name;
}

// "INVALID_ARGUMENT: inputs[x]...": the protocol has no field for the code.
grpc::ByteBuffer StreamError(absl::string_view request_id, const absl::Status& status) {
  const absl::Status visible = wire::ForClient(status);
  inference::ModelStreamInferResponse response;
  response.set_error_message(
      absl::StrCat(absl::StatusCodeToString(visible.code()), ": ", visible.message()));
  response.mutable_infer_response()->set_id(std::string(request_id));
  return wire::Encode(response);
}

constexpr int kSlots = 4;

// Answered at once, from what is in memory.
template <typename Request, typename Response>
void ServeAnswer(const Env& env, CallLoop* loop, absl::string_view method,
                 Filler<Request, Response> fill) {
  loop->Serve<UnaryCall>(Path(method), Need::kRead, kSlots, [&env, fill](UnaryCall* call) {
    AnswerWith<Request, Response>(env.in_flight, call,
                                  [&](const auto& in, auto* out) { return fill(env, in, out); });
  });
}

// As health is: while the server stops too, and whatever others hold.
template <typename Request, typename Response>
void ServeHealth(const Env& env, CallLoop* loop, absl::string_view method,
                 Filler<Request, Response> fill) {
  loop->Serve<UnaryCall>(
      Path(method), Need::kHealth, kSlots,
      [&env, fill](UnaryCall* call) {
        AnswerWith<Request, Response>(
            nullptr, call, [&](const auto& in, auto* out) { return fill(env, in, out); });
      },
      WhileDraining::kServed);
}

// Answered on the worker of pages, of a model that is awake, or will be.
template <typename Request, typename Response>
void ServeAwake(const Env& env, CallLoop* loop, absl::string_view method,
                Filler<Request, Response> fill) {
  loop->Serve<UnaryCall>(Path(method), Need::kRead, kSlots, [&env, fill](UnaryCall* call) {
    AnswerAwake(
        env.pages, env, call,
        [](const Request& request) { return wire::oip::SplitName(request.name()).model; }, fill);
  });
}

// Answered on a worker.
template <typename Request, typename Response>
void ServeOn(Worker* worker, const Env& env, CallLoop* loop, absl::string_view method, Need need,
             Filler<Request, Response> fill) {
  loop->Serve<UnaryCall>(Path(method), need, kSlots, [worker, &env, fill](UnaryCall* call) {
    AnswerOn(worker, env, call, fill);
  });
}

void ServeIndex(const Env& env, CallLoop* loop) {
  using Request = inference::RepositoryIndexRequest;
  const auto names = std::make_shared<NameList>();
  loop->Serve<UnaryCall>(
      Path("RepositoryIndex"), Need::kRead, kSlots, [&env, names](UnaryCall* call) {
        RunOn<Request>(env.lists, env, call, [&env, names, call](const Request& request) {
          grpc::ByteBuffer answer;
          const absl::Status status = Guarded([&]() -> absl::Status {
            AWQD_ASSIGN_OR_RETURN(answer, names->Encoded(env, request));
            return call->lease()->Resize(static_cast<int64_t>(answer.Length()), "answer");
          });
          status.ok() ? call->Answer(answer) : call->Finish(wire::ToGrpc(status));
        });
      });
}

void ServeInfer(const Env& env, const std::shared_ptr<Regions>& regions, CallLoop* loop) {
  // A burst of callers waits less when it need not be asked for one by one.
  constexpr int kMany = 64, kSome = 8;
  using wire::oip::Frame;
  loop->Serve<UnaryCall>(Path("ModelInfer"), Need::kInfer, kMany, [&env, regions](UnaryCall* call) {
    FlowCall::Start(call, [&](RequestFlow::Done done) {
      return MakeFlow({env, *regions, OwnerOf(*call), Frame::kAlone}, "ModelInfer", call,
                      *call->request(), std::move(done));
    });
  });
  loop->Serve<StreamCall>(
      Path("ModelStreamInfer"), Need::kInfer, kSome, [&env, regions](StreamCall* call) {
        StreamProtocol protocol;
        protocol.make_flow = [&env, regions, call](const grpc::ByteBuffer& message,
                                                   RequestFlow::Done done) {
          return MakeFlow({env, *regions, OwnerOf(*call), Frame::kOnStream}, "ModelStreamInfer",
                          call, message, std::move(done));
        };
        protocol.error = StreamError;
        protocol.in_order = true;  // clients that send no ids count on it
        StartRequestStream(env, call, std::move(protocol));
      });
}

void ServeRegions(const Env& env, const std::shared_ptr<Regions>& regions, CallLoop* loop) {
  loop->Serve<UnaryCall>(
      Path("SystemSharedMemoryStatus"), Need::kInfer, kSlots, [&env, regions](UnaryCall* call) {
        using Request = inference::SystemSharedMemoryStatusRequest;
        using Response = inference::SystemSharedMemoryStatusResponse;
        AnswerWith<Request, Response>(env.in_flight, call, [&](const auto& in, auto* out) {
          return ListRegions(env, *regions, OwnerOf(*call), in, out);
        });
      });
  loop->Serve<UnaryCall>(
      Path("SystemSharedMemoryRegister"), Need::kInfer, kSlots, [&env, regions](UnaryCall* call) {
        using Request = inference::SystemSharedMemoryRegisterRequest;
        using Response = inference::SystemSharedMemoryRegisterResponse;
        AnswerWith<Request, Response>(env.in_flight, call, [&](const auto& in, auto*) {
          return RegisterRegion(env, regions.get(), OwnerOf(*call), in);
        });
      });
  loop->Serve<UnaryCall>(
      Path("SystemSharedMemoryUnregister"), Need::kInfer, kSlots, [&env, regions](UnaryCall* call) {
        using Request = inference::SystemSharedMemoryUnregisterRequest;
        using Response = inference::SystemSharedMemoryUnregisterResponse;
        AnswerWith<Request, Response>(env.in_flight, call, [&](const auto& in, auto*) {
          return UnregisterRegion(env, regions.get(), OwnerOf(*call), in);
        });
      });
}

}  // namespace

void Serve(const Env& env, CallLoop* loop) {
  // The table lives as long as the handlers that know it.
  const auto regions = std::make_shared<Regions>();
  ServeInfer(env, regions, loop);
  ServeRegions(env, regions, loop);
  ServeHealth(env, loop, "ServerLive", IsLive);
  ServeHealth(env, loop, "ServerReady", IsReady);
  ServeAnswer(env, loop, "ModelReady", IsModelReady);
  ServeAnswer(env, loop, "ServerMetadata", DescribeServer);
  ServeAwake(env, loop, "ModelMetadata", DescribeModel);
  ServeAwake(env, loop, "ModelConfig", ConfigureModel);
  ServeOn(env.pages, env, loop, "ModelStatistics", Need::kRead, CountModels);
  ServeAnswer(env, loop, "TraceSetting", TellTracing);
  ServeAnswer(env, loop, "LogSettings", TellLogging);
  ServeIndex(env, loop);
  ServeOn(env.loads, env, loop, "RepositoryModelLoad", Need::kModelControl, Load);
  ServeOn(env.loads, env, loop, "RepositoryModelUnload", Need::kModelControl, Unload);
}

}  // namespace awqd::services::oip
