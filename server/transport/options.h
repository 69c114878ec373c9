// Limits, timeouts and addresses of the gRPC server.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/security/options.h"

namespace awqd::obs {
class CallRecorder;
}

namespace awqd::transport {

// Limits of one client: an identity, or where there are none a host. 0: no limit.
struct ClientQuota {
  int64_t requests_in_flight = 0;
  int64_t bytes_in_flight = 0;
  double requests_per_second = 0;

  bool any() const {
    return requests_in_flight > 0 || bytes_in_flight > 0 || requests_per_second > 0;
  }
};

// server/config/flags.cc explains each, and how to choose it.
struct Options {
  // Each "host:port" or "unix:/path", as ParseListenAddress reads them; at least one.
  std::vector<std::string> addresses = {"127.0.0.1:8001"};
  mode_t unix_socket_mode = 0660;
  security::Options security;
  ClientQuota client;
  int threads = 1;  // of the call loop
  // Whether a thread takes the calls that are there before it runs what is queued: some 25 us, in
  // which a batch gathers. Without, it runs what is submitted by the only call in flight.
  bool gathers = true;
  int64_t max_receive_message_bytes = int64_t{64} << 20;
  int64_t max_send_message_bytes = int64_t{64} << 20;
  int max_metadata_bytes = 8192;  // of the headers of a call
  int max_concurrent_streams = 256;
  int max_connections = 4096;
  int max_connections_per_peer = 1024;
  absl::Duration handshake_timeout = absl::Seconds(10);
  absl::Duration send_timeout = absl::Seconds(60);
  int64_t memory_quota_bytes = int64_t{1} << 30;
  absl::Duration keepalive_time = absl::Minutes(2);
  absl::Duration keepalive_timeout = absl::Seconds(20);
  absl::Duration min_ping_interval = absl::Seconds(10);
  absl::Duration max_connection_idle = absl::InfiniteDuration();
  absl::Duration max_connection_age = absl::InfiniteDuration();
  absl::Duration max_connection_age_grace = absl::InfiniteDuration();
  obs::CallRecorder* recorder = nullptr;  // is told of every call, outlives the server; or null
};

}  // namespace awqd::transport
