// The answers of channelz about a server, and the calls that it refuses.
#include "grpc/channelz/v1/channelz.pb.h"
#include "tests/server/services/raw_call.h"
#include "tests/server/services/rpc_fixture.h"

namespace awqd::services {
namespace {

namespace channelz = grpc::channelz::v1;
using ::testing::HasSubstr;

class ChannelzTest : public RpcTest {
 protected:
  void Configure(Options* options) override { options->channelz = true; }

  template <typename Request, typename Response>
  grpc::Status Ask(const std::string& method, const Request& request, Response* response) {
    std::string answer;
    const grpc::Status status = RawCall(channel_, "/grpc.channelz.v1.Channelz/" + method,
                                        request.SerializeAsString(), &answer);
    EXPECT_TRUE(response->ParseFromString(answer));
    return status;
  }
};

TEST_F(ChannelzTest, TellsOfServersAndTheirConnections) {
  channelz::GetServersResponse servers;
  ASSERT_TRUE(Ask("GetServers", channelz::GetServersRequest(), &servers).ok());
  ASSERT_GE(servers.server_size(), 1);
  // The server in this process that has accepted a call by now.
  int64_t connections = 0;
  for (const channelz::Server& server : servers.server()) {
    channelz::GetServerRequest one;
    one.set_server_id(server.ref().server_id());
    channelz::GetServerResponse same;
    ASSERT_TRUE(Ask("GetServer", one, &same).ok());
    EXPECT_EQ(same.server().ref().server_id(), server.ref().server_id());
    channelz::GetServerSocketsRequest request;
    request.set_server_id(server.ref().server_id());
    channelz::GetServerSocketsResponse sockets;
    ASSERT_TRUE(Ask("GetServerSockets", request, &sockets).ok());
    for (const channelz::SocketRef& ref : sockets.socket_ref()) {
      channelz::GetSocketRequest which;
      which.set_socket_id(ref.socket_id());
      channelz::GetSocketResponse socket;
      ASSERT_TRUE(Ask("GetSocket", which, &socket).ok());
      if (socket.socket().data().streams_started() > 0) ++connections;
    }
  }
  EXPECT_GE(connections, 1);
  channelz::GetTopChannelsResponse channels;
  ASSERT_TRUE(Ask("GetTopChannels", channelz::GetTopChannelsRequest(), &channels).ok());
  EXPECT_GE(channels.channel_size(), 1) << "that of this test";
}

TEST_F(ChannelzTest, RefusesNegativeNumbersAndWhatIsNotThere) {
  channelz::GetServersResponse servers;
  ASSERT_TRUE(Ask("GetServers", channelz::GetServersRequest(), &servers).ok());
  channelz::GetServerSocketsRequest request;
  request.set_server_id(servers.server(0).ref().server_id());
  request.set_max_results(-1);
  channelz::GetServerSocketsResponse sockets;
  const grpc::Status negative = Ask("GetServerSockets", request, &sockets);
  EXPECT_EQ(negative.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(negative.error_message(), HasSubstr("max_results: got -1, expected 0 or more"));
  channelz::GetSocketRequest none;
  none.set_socket_id(int64_t{1} << 40);
  channelz::GetSocketResponse socket;
  EXPECT_EQ(Ask("GetSocket", none, &socket).error_code(), grpc::StatusCode::NOT_FOUND);
  channelz::GetChannelRequest below;
  below.set_channel_id(-7);
  channelz::GetChannelResponse channel;
  EXPECT_EQ(Ask("GetChannel", below, &channel).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(RpcTest, ChannelzIsOffUnlessAskedFor) {
  EXPECT_EQ(RawCall(channel_, "/grpc.channelz.v1.Channelz/GetServers", "").error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

}  // namespace
}  // namespace awqd::services
