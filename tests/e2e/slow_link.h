// SlowLink: a slow network between one client and a server on this machine.
#pragma once

#include <cstdint>
#include <string>
#include <thread>

#include "absl/time/time.h"

namespace awqd {

// Passes on what one connection carries: to the client `kPieceBytes` in each `kPiece` of time, to
// the server at once. What waits for its turn lies in the server's socket, as it would with a slow
// network.
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

  // For the client to connect to.
  const std::string& address() const { return address_; }

 private:
  void Run(int server_port);

  const int listener_;
  std::string address_;
  int stop_[2] = {-1, -1};  // a pipe: its end ends the thread
  std::thread thread_;
};

}  // namespace awqd
