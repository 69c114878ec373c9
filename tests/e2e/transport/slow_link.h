// SlowLink: a slow network between one client and a server on this machine.
#pragma once

#include <cstdint>
#include <string>
#include <thread>

#include "absl/time/time.h"

namespace awqd {

// Forwards one connection: to the client `kPieceBytes` in each `kPiece` of time, to the server at
// once. Waiting bytes are in the server's socket, as with a slow network.
class SlowLink {
 public:
  static constexpr int64_t kPieceBytes = 64 << 10;
  static constexpr absl::Duration kPiece = absl::Milliseconds(10);

  // `server` is "127.0.0.1:port".
  explicit SlowLink(const std::string& server);
  // Ends the connection.
  ~SlowLink();
  SlowLink(const SlowLink&) = delete;
  SlowLink& operator=(const SlowLink&) = delete;

  // The address for the client.
  const std::string& address() const { return address_; }

 private:
  void Run(int server_port);

  const int listener_;
  std::string address_;
  int stop_[2] = {-1, -1};  // a pipe; closing it ends the thread
  std::thread thread_;
};

}  // namespace awqd
