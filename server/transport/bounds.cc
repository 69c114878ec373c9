// Bounds and timers of the gRPC server.
#include "server/transport/bounds.h"

#include <algorithm>
#include <climits>
#include <cstdint>

#include "absl/time/time.h"
#include "grpc/compression.h"
#include "grpcpp/resource_quota.h"

namespace awqd::transport {
namespace {

int Millis(absl::Duration duration) {
  return static_cast<int>(std::min<int64_t>(absl::ToInt64Milliseconds(duration), int64_t{INT_MAX}));
}

}  // namespace

void ApplyOptions(const Options& options, grpc::ServerBuilder* builder) {
  // Services refuse what is over the receive limit themselves, in words that say which limit it is.
  // It makes no difference to memory: gRPC too looks at a message only when all of it is here.
  builder->SetMaxReceiveMessageSize(INT_MAX);
  builder->SetMaxSendMessageSize(static_cast<int>(options.max_send_message_bytes));
  // The receive bound is checked after a message was inflated, so compressed ones are refused.
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  grpc::ResourceQuota quota("awqd");
  quota.Resize(static_cast<size_t>(options.memory_quota_bytes));
  builder->SetResourceQuota(quota);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_concurrent_streams);
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Of TLS, and of settings that arrive within it: the acceptor waits for those in plaintext.
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                              Millis(options.handshake_timeout));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Millis(options.keepalive_time));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Millis(options.keepalive_timeout));
  // gRPC 1.83 never starts the timer of the argument above, and closes after this one, 60 s unless
  // it is set. gRPC 1.51 does not know it.
  builder->AddChannelArgument("grpc.http2.ping_timeout_ms", Millis(options.keepalive_timeout));
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              Millis(options.min_ping_interval));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, Millis(options.max_connection_idle));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, Millis(options.max_connection_age));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                              Millis(options.max_connection_age_grace));
}

}  // namespace awqd::transport
