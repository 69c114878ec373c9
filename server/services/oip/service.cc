// One line for each method: how it is named, what it asks of its callers, who answers.
#include "server/services/oip/service.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "server/services/oip/metadata.h"
#include "server/services/oip/oip_codec.h"
#include "server/services/unary.h"

namespace awqd::services::oip {
namespace {

using security::Need;
using transport::CallLoop, transport::UnaryCall, transport::WhileDraining;

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

constexpr int kSlots = 4;

// Answered at once, from what is in memory.
template <typename Request, typename Response>
void ServeAnswer(const Env& env, CallLoop* loop, absl::string_view method, Need need,
                 Filler<Request, Response> fill,
                 WhileDraining while_draining = WhileDraining::kTurnedAway) {
  loop->Serve<UnaryCall>(
      Path(method), need, kSlots, [&env, fill](UnaryCall* call) { Answer(env, call, fill); },
      while_draining);
}

}  // namespace

void Serve(const Env& env, CallLoop* loop) {
  // A burst of callers waits less when it need not be asked for one by one.
  constexpr int kMany = 64;
  loop->Serve<UnaryCall>(Path("ModelInfer"), Need::kInfer, kMany, [&env](UnaryCall* call) {
    FlowCall::Start(call, [&](RequestFlow::Done done) {
      return MakeFlow(env, "ModelInfer", call, *call->request(), wire::oip::Frame::kAlone,
                      std::move(done));
    });
  });
  // What health checks ask is answered while the server stops, as health is.
  ServeAnswer(env, loop, "ServerLive", Need::kHealth, IsLive, WhileDraining::kServed);
  ServeAnswer(env, loop, "ServerReady", Need::kHealth, IsReady, WhileDraining::kServed);
  ServeAnswer(env, loop, "ModelReady", Need::kRead, IsModelReady);
  ServeAnswer(env, loop, "ServerMetadata", Need::kRead, DescribeServer);
  ServeAnswer(env, loop, "ModelMetadata", Need::kRead, DescribeModel);
}

}  // namespace awqd::services::oip
