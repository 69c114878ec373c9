// How a unary call with a small answer is handled.
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "google/protobuf/message_lite.h"
#include "kernels/base/status.h"
#include "server/services/env.h"
#include "server/services/waking.h"
#include "server/transport/call_kinds.h"
#include "server/transport/guard.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"
#include "server/wire/validate.h"

namespace awqd::services {

// Ends the call with the message, or with the error as clients may see it.
inline void Reply(transport::UnaryCall* call, const absl::Status& status,
                  const google::protobuf::MessageLite& message) {
  status.ok() ? call->Answer(wire::Encode(message)) : call->Finish(wire::ToGrpc(status));
}

// Whether `name` of a request is a model's, which is then checked before anything else.
template <typename Request>
inline constexpr bool kNamesModel = false;

template <typename Request>
absl::Status ParseNamed(transport::UnaryCall* call, Request* request) {
  AWQD_RETURN_IF_ERROR(wire::Parse(call->request(), request));
  if constexpr (kNamesModel<Request>) return wire::CheckName(request->name());
  return absl::OkStatus();
}

// Fills an answer from a request.
template <typename Request, typename Response>
using Filler = absl::Status (*)(const Env& env, const Request& request, Response* response);

// Answers with what `fill(request, &response)` makes of the request.
template <typename Request, typename Response, typename Fill>
void AnswerWith(transport::UnaryCall* call, Fill fill) {
  Response response;
  const absl::Status status = transport::Guarded([&]() -> absl::Status {
    Request request;
    AWQD_RETURN_IF_ERROR(ParseNamed(call, &request));
    return fill(request, &response);
  });
  Reply(call, status, response);
}

// Answers where the answer is at hand.
template <typename Request, typename Response>
void Answer(const Env& env, transport::UnaryCall* call, Filler<Request, Response> fill) {
  AnswerWith<Request, Response>(call, [&](const Request& request, Response* response) {
    return fill(env, request, response);
  });
}

// The answer to a request that was parsed, to be made later.
template <typename Request, typename Response>
auto AnswerTo(Request request, const Env& env, transport::UnaryCall* call,
              Filler<Request, Response> fill) {
  return [&env, call, fill, request = std::move(request)] {
    Response response;
    const absl::Status status = transport::Guarded([&] { return fill(env, request, &response); });
    Reply(call, status, response);
  };
}

// As Answer, on `worker`: `fill` may block.
template <typename Request, typename Response>
void AnswerOn(Worker* worker, const Env& env, transport::UnaryCall* call,
              Filler<Request, Response> fill) {
  const absl::Status accepted = transport::Guarded([&]() -> absl::Status {
    Request request;
    AWQD_RETURN_IF_ERROR(ParseNamed(call, &request));
    return worker->Run(AnswerTo(std::move(request), env, call, fill));
  });
  if (!accepted.ok()) call->Finish(wire::ToGrpc(accepted));
}

// As AnswerOn, once the model that `model_of(request)` names is awake.
template <typename Request, typename Response, typename ModelOf>
void AnswerAwake(Worker* worker, const Env& env, transport::UnaryCall* call, ModelOf model_of,
                 Filler<Request, Response> fill) {
  const absl::Status accepted = transport::Guarded([&]() -> absl::Status {
    Request request;
    AWQD_RETURN_IF_ERROR(ParseNamed(call, &request));
    const std::string model = model_of(request);
    auto answer = AnswerTo(std::move(request), env, call, fill);
    if (!env.models->Asleep(model)) return worker->Run(std::move(answer));
    return env.waking->Wake(model, [worker, call, answer = std::move(answer)](const auto& woken) {
      const absl::Status status = woken.ok() ? worker->Run(answer) : woken;
      if (!status.ok()) call->Finish(wire::ToGrpc(status));
    });
  });
  if (!accepted.ok()) call->Finish(wire::ToGrpc(accepted));
}

}  // namespace awqd::services
