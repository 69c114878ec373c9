// The standard channelz service, of what gRPC counts anyway.
//
// Our own methods instead of gRPC's service, which would not pass the door, and which ends the
// process when a client sends a negative number.
#include <cstdint>
#include <memory>

#include "absl/strings/str_cat.h"
#include "google/protobuf/util/json_util.h"
#include "grpc/channelz/v1/channelz.pb.h"
#include "grpc/grpc.h"
#include "grpc/support/alloc.h"
#include "kernels/base/status.h"
#include "server/services/env.h"
#include "server/services/unary.h"

namespace awqd::services {
namespace {

namespace channelz = grpc::channelz::v1;

absl::Status CheckNumber(absl::string_view field, int64_t got) {
  if (got >= 0) return absl::OkStatus();
  return wire::FieldError(field, absl::StrCat(got), "0 or more");
}

// `json`: gRPC's answer, which is freed here; null where there is no such thing.
template <typename Response>
absl::Status Fill(char* json, Response* response) {
  const std::unique_ptr<char, void (*)(void*)> owned(json, gpr_free);
  if (json == nullptr) return absl::NotFoundError("channelz: nothing has that id");
  google::protobuf::util::JsonParseOptions options;
  options.case_insensitive_enum_parsing = true;
  const auto status = google::protobuf::util::JsonStringToMessage(json, response, options);
  return status.ok() ? absl::OkStatus()
                     : absl::InternalError(absl::StrCat("channelz: ", status.ToString()));
}

absl::Status TopChannels(const Env&, const channelz::GetTopChannelsRequest& request,
                         channelz::GetTopChannelsResponse* response) {
  AWQD_RETURN_IF_ERROR(CheckNumber("start_channel_id", request.start_channel_id()));
  return Fill(grpc_channelz_get_top_channels(request.start_channel_id()), response);
}

absl::Status Servers(const Env&, const channelz::GetServersRequest& request,
                     channelz::GetServersResponse* response) {
  AWQD_RETURN_IF_ERROR(CheckNumber("start_server_id", request.start_server_id()));
  return Fill(grpc_channelz_get_servers(request.start_server_id()), response);
}

absl::Status Server(const Env&, const channelz::GetServerRequest& request,
                    channelz::GetServerResponse* response) {
  AWQD_RETURN_IF_ERROR(CheckNumber("server_id", request.server_id()));
  return Fill(grpc_channelz_get_server(request.server_id()), response);
}

absl::Status ServerSockets(const Env&, const channelz::GetServerSocketsRequest& request,
                           channelz::GetServerSocketsResponse* response) {
  AWQD_RETURN_IF_ERROR(CheckNumber("server_id", request.server_id()));
  AWQD_RETURN_IF_ERROR(CheckNumber("start_socket_id", request.start_socket_id()));
  AWQD_RETURN_IF_ERROR(CheckNumber("max_results", request.max_results()));
  return Fill(grpc_channelz_get_server_sockets(request.server_id(), request.start_socket_id(),
                                               request.max_results()),
              response);
}

absl::Status Channel(const Env&, const channelz::GetChannelRequest& request,
                     channelz::GetChannelResponse* response) {
  AWQD_RETURN_IF_ERROR(CheckNumber("channel_id", request.channel_id()));
  return Fill(grpc_channelz_get_channel(request.channel_id()), response);
}

absl::Status Subchannel(const Env&, const channelz::GetSubchannelRequest& request,
                        channelz::GetSubchannelResponse* response) {
  AWQD_RETURN_IF_ERROR(CheckNumber("subchannel_id", request.subchannel_id()));
  return Fill(grpc_channelz_get_subchannel(request.subchannel_id()), response);
}

absl::Status Socket(const Env&, const channelz::GetSocketRequest& request,
                    channelz::GetSocketResponse* response) {
  AWQD_RETURN_IF_ERROR(CheckNumber("socket_id", request.socket_id()));
  return Fill(grpc_channelz_get_socket(request.socket_id()), response);
}

// On a worker: gRPC makes a text of up to 500 sockets, and that is parsed.
template <typename Request, typename Response>
void Serve(const Env& env, absl::string_view method, Filler<Request, Response> fill,
           transport::CallLoop* loop) {
  using transport::UnaryCall;
  loop->Serve<UnaryCall>(absl::StrCat("grpc.channelz.v1.Channelz/", method), security::Need::kAdmin,
                         /*slots=*/1,
                         [&env, fill](UnaryCall* call) { AnswerOn(env.lists, env, call, fill); });
}

}  // namespace

void ServeChannelz(const Env& env, transport::CallLoop* loop) {
  Serve(env, "GetTopChannels", TopChannels, loop);
  Serve(env, "GetServers", Servers, loop);
  Serve(env, "GetServer", Server, loop);
  Serve(env, "GetServerSockets", ServerSockets, loop);
  Serve(env, "GetChannel", Channel, loop);
  Serve(env, "GetSubchannel", Subchannel, loop);
  Serve(env, "GetSocket", Socket, loop);
}

}  // namespace awqd::services
