// Unary calls with a small answer: parsed, and answered at once or on a task queue.
#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "server/repository/idle_models.h"
#include "server/services/env.h"
#include "server/transport/call.h"
#include "server/transport/call_loop.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"
#include "server/wire/validation.h"

namespace awqd::services {

// Where and for whom a method is answered.
struct UnaryOptions {
  // Health is answered while the server stops too, and whatever others hold of the budget.
  security::Need need = security::Need::kRead;
  TaskQueue* queue = nullptr;  // null: at once, because all data is in memory
  // `name` of the request is the name of a model, which is checked before anything else.
  bool names_model = false;
  // The model of `name`, MODEL or MODEL/WEIGHT, is loaded first if it was unloaded while idle.
  // Needs a queue.
  bool loads_model = false;
};

// Fills an answer from a request.
template <typename Request, typename Response>
using Filler = std::function<absl::Status(const transport::UnaryCall& call, const Request& request,
                                          Response* response)>;

// Counts the request in the budget for as long as its call waits for an answer.
template <typename Request>
absl::Status ParseCounted(const Env& env, const UnaryOptions& options, transport::UnaryCall* call,
                          Request* request) {
  if (options.need != security::Need::kHealth) {
    const auto bytes = static_cast<int64_t>(call->request()->Length());
    AWQD_ASSIGN_OR_RETURN(*call->lease(),
                          env.in_flight->AcquireBytes(call->charge(), bytes, "request"));
  }
  AWQD_RETURN_IF_ERROR(wire::Parse(call->request(), request));
  // Nobody reads what this version does not know, and the parser keeps it as something larger.
  request->DiscardUnknownFields();
  if constexpr (requires { request->name(); }) {
    if (options.names_model) return wire::CheckName(request->name());
  }
  return absl::OkStatus();
}

// Runs `job`, which ends the call, on the options' queue.
template <typename Request>
absl::Status RunOnQueue(const Env& env, const UnaryOptions& options, transport::UnaryCall* call,
                        const Request& request, std::function<void()> job) {
  if constexpr (requires { request.name(); }) {
    const std::string model = request.name().substr(0, request.name().find('/'));
    if (options.loads_model && env.models->IsUnloadedIdle(model)) {
      return env.on_demand->Request(
          model, [queue = options.queue, call, job = std::move(job)](const absl::Status& loaded) {
            const absl::Status status = loaded.ok() ? queue->Run(job) : loaded;
            if (!status.ok()) call->Finish(wire::ToGrpc(status));
          });
    }
  }
  return options.queue->Run(std::move(job));
}

// Puts `method`, "package.Service/Method", on the loop.
template <typename Request, typename Response>
void ServeUnary(const Env& env, absl::string_view method, const UnaryOptions& options,
                Filler<Request, Response> fill) {
  constexpr int kSlots = 4;
  const auto handle = [&env, options, fill = std::move(fill)](transport::UnaryCall* call) {
    const auto answer = [call, &fill](const Request& request) {
      Response response;
      absl::Status status = CatchExceptions([&] { return fill(*call, request, &response); });
      // A call whose request was counted counts its answer from here on until it was sent. The
      // answer is encoded only if the budget has room for it.
      const auto send = [&](size_t bytes, auto encoded) {
        if (status.ok()) status = call->lease()->Resize(static_cast<int64_t>(bytes), "answer");
        status.ok() ? call->Answer(encoded()) : call->Finish(wire::ToGrpc(status));
      };
      if constexpr (std::is_same_v<Response, grpc::ByteBuffer>) {
        send(response.Length(), [&] { return response; });
      } else {
        send(response.ByteSizeLong(), [&] { return wire::Encode(response); });
      }
    };
    Request request;
    absl::Status status =
        CatchExceptions([&] { return ParseCounted(env, options, call, &request); });
    if (status.ok() && options.queue == nullptr) return answer(request);
    if (status.ok()) {
      status = CatchExceptions([&] {
        return RunOnQueue(env, options, call, request, [answer, request] { answer(request); });
      });
    }
    if (!status.ok()) call->Finish(wire::ToGrpc(status));
  };
  env.loop->Serve<transport::UnaryCall>(method, options.need, kSlots, handle);
}
// The same, for an answer that does not depend on the call.
template <typename Request, typename Response>
void ServeUnary(const Env& env, absl::string_view method, const UnaryOptions& options,

                absl::Status (*fill)(const Env& env, const Request& request, Response* response)) {
  ServeUnary<Request, Response>(
      env, method, options,
      [&env, fill](const transport::UnaryCall&, const Request& request, Response* response) {
        return fill(env, request, response);
      });
}

}  // namespace awqd::services
