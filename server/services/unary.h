// Unary calls with a small answer: parsed, and answered at once or on a task queue.
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "google/protobuf/message_lite.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "server/repository/load_on_demand.h"
#include "server/services/env.h"
#include "server/transport/byte_budget.h"
#include "server/transport/call.h"
#include "server/transport/call_loop.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"
#include "server/wire/validation.h"

namespace awqd::services {

// Ends the call with the message, or with the error as clients may see it. A call whose request was
// counted (ParseNamed) counts its answer from here on until it was sent. The answer is encoded only
// if the budget has room for it.
inline void Reply(transport::UnaryCall* call, absl::Status status,
                  const google::protobuf::MessageLite& message) {
  if (status.ok()) {
    status = call->lease()->Resize(static_cast<int64_t>(message.ByteSizeLong()), "answer");
  }
  status.ok() ? call->Answer(wire::Encode(message)) : call->Finish(wire::ToGrpc(status));
}

// Whether `name` of a request is the name of a model, which is then checked before anything else.
template <typename Request>
inline constexpr bool kNamesModel = false;

// Counts the request in `budget` for as long as its call waits for an answer. Null: health, which
// is answered whatever others hold.
template <typename Request>
absl::Status ParseNamed(transport::ByteBudget* budget, transport::UnaryCall* call,
                        Request* request) {
  if (budget != nullptr) {
    const auto bytes = static_cast<int64_t>(call->request()->Length());
    AWQD_ASSIGN_OR_RETURN(*call->lease(), budget->AcquireBytes(call->charge(), bytes, "request"));
  }
  AWQD_RETURN_IF_ERROR(wire::Parse(call->request(), request));
  // Nobody reads what this version does not know, and the parser keeps it as something larger.
  request->DiscardUnknownFields();
  if constexpr (kNamesModel<Request>) return wire::CheckName(request->name());
  return absl::OkStatus();
}

// Fills an answer from a request.
template <typename Request, typename Response>
using Filler = absl::Status (*)(const Env& env, const Request& request, Response* response);

// Answers at once with `fill(request, &response)`, where all data is in memory.
template <typename Request, typename Response, typename Fill>
void AnswerWith(transport::ByteBudget* budget, transport::UnaryCall* call, Fill fill) {
  Response response;
  const absl::Status status = CatchExceptions([&]() -> absl::Status {
    Request request;
    AWQD_RETURN_IF_ERROR(ParseNamed(budget, call, &request));
    return fill(request, &response);
  });
  Reply(call, status, response);
}

// Runs `answer(request)` on `queue`, where it may block. It ends the call.
template <typename Request, typename Answer>
void RunOn(TaskQueue* queue, const Env& env, transport::UnaryCall* call, Answer answer) {
  const absl::Status accepted = CatchExceptions([&]() -> absl::Status {
    Request request;
    AWQD_RETURN_IF_ERROR(ParseNamed(env.in_flight, call, &request));
    return queue->Run(
        [request = std::move(request), answer = std::move(answer)] { answer(request); });
  });
  if (!accepted.ok()) call->Finish(wire::ToGrpc(accepted));
}

// Makes the answer to a parsed request later.
template <typename Request, typename Response>
auto AnswerLater(const Env& env, transport::UnaryCall* call, Filler<Request, Response> fill) {
  return [&env, call, fill](const Request& request) {
    Response response;
    const absl::Status status = CatchExceptions([&] { return fill(env, request, &response); });
    Reply(call, status, response);
  };
}

// Answers with `fill(env, request, &response)` on `queue`.
template <typename Request, typename Response>
void AnswerOn(TaskQueue* queue, const Env& env, transport::UnaryCall* call,
              Filler<Request, Response> fill) {
  RunOn<Request>(queue, env, call, AnswerLater(env, call, fill));
}

// As AnswerOn, once the model that `model_of(request)` names is loaded.
template <typename Request, typename Response, typename ModelOf>
void AnswerLoaded(TaskQueue* queue, const Env& env, transport::UnaryCall* call, ModelOf model_of,
                  Filler<Request, Response> fill) {
  const absl::Status accepted = CatchExceptions([&]() -> absl::Status {
    Request request;
    AWQD_RETURN_IF_ERROR(ParseNamed(env.in_flight, call, &request));
    const std::string model = model_of(request);
    auto answer = [answer = AnswerLater(env, call, fill), request = std::move(request)] {
      answer(request);
    };
    if (!env.models->IsUnloadedIdle(model)) return queue->Run(std::move(answer));
    return env.on_demand->Request(
        model, [queue, call, answer = std::move(answer)](const auto& loaded) {
          const absl::Status status = loaded.ok() ? queue->Run(answer) : loaded;
          if (!status.ok()) call->Finish(wire::ToGrpc(status));
        });
  });
  if (!accepted.ok()) call->Finish(wire::ToGrpc(accepted));
}

}  // namespace awqd::services
