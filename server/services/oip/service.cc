// The small methods, one line each: its name, the need of its callers, where it is answered.
#include "server/services/oip/service.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/services/oip/models.h"
#include "server/services/oip/regions.h"
#include "server/services/oip/repository.h"
#include "server/services/unary.h"
#include "server/wire/oip/name.h"

namespace awqd::services::oip {
namespace {

using security::Need;
using transport::CallLoop, transport::ServerCall, transport::UnaryCall;
using transport::WhileDraining;

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

constexpr int kSlots = 4;

// Where and for whom a method is answered.
struct UnaryOptions {
  Need need = Need::kRead;
  TaskQueue* queue = nullptr;  // null: at once, because all data is in memory
  bool loads_model = false;    // loads the model that the request names first, if it is unloaded
};
// Health is answered while the server stops too, and is not counted in the budget.
constexpr UnaryOptions kHealth = {Need::kHealth};

template <typename Request, typename Response>
void ServeUnary(const Env& env, CallLoop* loop, absl::string_view method,
                const UnaryOptions& options, Filler<Request, Response> fill) {
  const bool is_health = options.need == Need::kHealth;
  const auto handle = [&env, options, is_health, fill](UnaryCall* call) {
    if constexpr (requires(const Request& request) { request.name(); }) {
      if (options.loads_model) {
        return AnswerLoaded(
            options.queue, env, call,
            [](const Request& request) { return wire::oip::SplitName(request.name()).model; },
            fill);
      }
    }
    if (options.queue != nullptr) return AnswerOn(options.queue, env, call, fill);
    AnswerWith<Request, Response>(
        is_health ? nullptr : env.in_flight, call,
        [&](const Request& request, Response* response) { return fill(env, request, response); });
  };
  loop->Serve<UnaryCall>(MethodPath(method), options.need, kSlots, handle,
                         is_health ? WhileDraining::kServed : WhileDraining::kRejected);
}

// A call about the regions of its owner: `answer(owner, request, response)`.
template <typename Request, typename Response, typename Answer>
void ServeOwner(const Env& env, CallLoop* loop, absl::string_view method, Answer answer) {
  loop->Serve<UnaryCall>(MethodPath(method), Need::kInfer, kSlots, [&env, answer](UnaryCall* call) {
    AnswerWith<Request, Response>(env.in_flight, call,
                                  [&](const Request& request, Response* response) {
                                    return answer(OwnerName(*call), request, response);
                                  });
  });
}

void ServeIndex(const Env& env, CallLoop* loop) {
  using Request = inference::RepositoryIndexRequest;
  const auto names = std::make_shared<NameList>();
  loop->Serve<UnaryCall>(
      MethodPath("RepositoryIndex"), Need::kRead, kSlots, [&env, names](UnaryCall* call) {
        RunOn<Request>(env.lists, env, call, [&env, names, call](const Request& request) {
          grpc::ByteBuffer answer;
          const absl::Status status = CatchExceptions([&]() -> absl::Status {
            AWQD_ASSIGN_OR_RETURN(answer, names->Encoded(env, request));
            return call->lease()->Resize(static_cast<int64_t>(answer.Length()), "answer");
          });
          status.ok() ? call->Answer(answer) : call->Finish(wire::ToGrpc(status));
        });
      });
}

void ServeRegions(const Env& env, const std::shared_ptr<Regions>& regions, CallLoop* loop) {
  using inference::SystemSharedMemoryRegisterRequest, inference::SystemSharedMemoryRegisterResponse;
  using inference::SystemSharedMemoryStatusRequest, inference::SystemSharedMemoryStatusResponse;
  using inference::SystemSharedMemoryUnregisterRequest;
  using inference::SystemSharedMemoryUnregisterResponse;
  ServeOwner<SystemSharedMemoryStatusRequest, SystemSharedMemoryStatusResponse>(
      env, loop, "SystemSharedMemoryStatus",
      [&env, regions](const std::string& owner, const auto& request, auto* response) {
        return ListRegions(env, *regions, owner, request, response);
      });
  ServeOwner<SystemSharedMemoryRegisterRequest, SystemSharedMemoryRegisterResponse>(
      env, loop, "SystemSharedMemoryRegister",
      [&env, regions](const std::string& owner, const auto& request, auto*) {
        return RegisterRegion(env, regions.get(), owner, request);
      });
  ServeOwner<SystemSharedMemoryUnregisterRequest, SystemSharedMemoryUnregisterResponse>(
      env, loop, "SystemSharedMemoryUnregister",
      [&env, regions](const std::string& owner, const auto& request, auto*) {
        return UnregisterRegion(env, regions.get(), owner, request);
      });
}

}  // namespace

std::string MethodPath(absl::string_view method) {
  return absl::StrCat(inference::ModelInferRequest::descriptor()->file()->service(0)->full_name(),
                      "/", method);
}

std::string OwnerName(const ServerCall& call) {
  return call.identity() == nullptr ? "" : call.identity()->name;
}

void Serve(const Env& env, CallLoop* loop) {
  // The table lives as long as the handlers that know it.
  const auto regions = std::make_shared<Regions>();
  const UnaryOptions in_memory = {}, pages = {.queue = env.pages};
  const UnaryOptions of_model = {.queue = env.pages, .loads_model = true};
  const UnaryOptions loads = {Need::kModelControl, env.loads};
  ServeInfer(env, regions, loop);
  ServeRegions(env, regions, loop);
  ServeUnary(env, loop, "ServerLive", kHealth, IsLive);
  ServeUnary(env, loop, "ServerReady", kHealth, IsReady);
  ServeUnary(env, loop, "ModelReady", in_memory, IsModelReady);
  ServeUnary(env, loop, "ServerMetadata", in_memory, DescribeServer);
  ServeUnary(env, loop, "ModelMetadata", of_model, DescribeModel);
  ServeUnary(env, loop, "ModelConfig", of_model, ConfigureModel);
  ServeUnary(env, loop, "ModelStatistics", pages, CountModels);
  ServeUnary(env, loop, "TraceSetting", in_memory, TellTracing);
  ServeUnary(env, loop, "LogSettings", in_memory, TellLogging);
  ServeIndex(env, loop);
  ServeUnary(env, loop, "RepositoryModelLoad", loads, Load);
  ServeUnary(env, loop, "RepositoryModelUnload", loads, Unload);
}

}  // namespace awqd::services::oip
