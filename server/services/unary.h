// How a unary call with a small answer is handled.
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "google/protobuf/message_lite.h"
#include "kernels/base/status.h"
#include "server/repository/load_on_demand.h"
#include "server/services/env.h"
#include "server/transport/byte_budget.h"
#include "server/transport/call_kinds.h"
#include "server/transport/guard.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"
#include "server/wire/validate.h"

namespace awqd::services {

// Ends the call with the message, or with the error as clients may see it. A call whose request was
// counted (ParseNamed) counts its answer from here on until it was sent. An answer that the budget
// has no room for is not encoded.
inline void Reply(transport::UnaryCall* call, absl::Status status,
                  const google::protobuf::MessageLite& message) {
  if (status.ok()) {
    status = call->lease()->Resize(static_cast<int64_t>(message.ByteSizeLong()), "answer");
  }
  status.ok() ? call->Answer(wire::Encode(message)) : call->Finish(wire::ToGrpc(status));
}

// Whether `name` of a request is a model's, which is then checked before anything else.
template <typename Request>
inline constexpr bool kNamesModel = false;

// Counts the request in `budget` for as long as its call waits for an answer. Null: health, which
// is answered whatever others hold.
template <typename Request>
absl::Status ParseNamed(transport::ByteBudget* budget, transport::UnaryCall* call,
                        Request* request) {
  if (budget != nullptr) {
    const auto bytes = static_cast<int64_t>(call->request()->Length());
    AWQD_ASSIGN_OR_RETURN(*call->lease(), budget->Take(call->connection(), bytes, "request"));
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

// Answers with what `fill(request, &response)` makes of the request, where the answer is at hand.
template <typename Request, typename Response, typename Fill>
void AnswerWith(transport::ByteBudget* budget, transport::UnaryCall* call, Fill fill) {
  Response response;
  const absl::Status status = transport::Guarded([&]() -> absl::Status {
    Request request;
    AWQD_RETURN_IF_ERROR(ParseNamed(budget, call, &request));
    return fill(request, &response);
  });
  Reply(call, status, response);
}

// Runs `answer(request)` on `worker`, where it may block. It ends the call.
template <typename Request, typename Answer>
void RunOn(Worker* worker, const Env& env, transport::UnaryCall* call, Answer answer) {
  const absl::Status accepted = transport::Guarded([&]() -> absl::Status {
    Request request;
    AWQD_RETURN_IF_ERROR(ParseNamed(env.in_flight, call, &request));
    return worker->Run(
        [request = std::move(request), answer = std::move(answer)] { answer(request); });
  });
  if (!accepted.ok()) call->Finish(wire::ToGrpc(accepted));
}

// The answer to a request that was parsed, to be made later.
template <typename Request, typename Response>
auto AnswerLater(const Env& env, transport::UnaryCall* call, Filler<Request, Response> fill) {
  return [&env, call, fill](const Request& request) {
    Response response;
    const absl::Status status = transport::Guarded([&] { return fill(env, request, &response); });
    Reply(call, status, response);
  };
}

// Answers with what `fill` makes of the request, on `worker`.
template <typename Request, typename Response>
void AnswerOn(Worker* worker, const Env& env, transport::UnaryCall* call,
              Filler<Request, Response> fill) {
  RunOn<Request>(worker, env, call, AnswerLater(env, call, fill));
}

// As AnswerOn, once the model that `model_of(request)` names is loaded.
template <typename Request, typename Response, typename ModelOf>
void AnswerAwake(Worker* worker, const Env& env, transport::UnaryCall* call, ModelOf model_of,
                 Filler<Request, Response> fill) {
  const absl::Status accepted = transport::Guarded([&]() -> absl::Status {
    Request request;
    AWQD_RETURN_IF_ERROR(ParseNamed(env.in_flight, call, &request));
    const std::string model = model_of(request);
    auto answer = [answer = AnswerLater(env, call, fill), request = std::move(request)] {
      answer(request);
    };
    if (!env.models->IsUnloadedIdle(model)) return worker->Run(std::move(answer));
    return env.on_demand->Request(
        model, [worker, call, answer = std::move(answer)](const auto& loaded) {
          const absl::Status status = loaded.ok() ? worker->Run(answer) : loaded;
          if (!status.ok()) call->Finish(wire::ToGrpc(status));
        });
  });
  if (!accepted.ok()) call->Finish(wire::ToGrpc(accepted));
}

}  // namespace awqd::services
