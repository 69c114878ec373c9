// HTTP/2 by hand over a plain socket (RFC 9113), for bytes that no gRPC client would send. Headers
// are literals without Huffman coding (RFC 7541).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace awqd {

// The port of "127.0.0.1:43211"; 0 without one.
int PortOf(const std::string& address);

// A TCP connection to a loopback port that sends given bytes. Not thread-safe.
class Socket {
 public:
  explicit Socket(int port);
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  bool connected() const { return connected_; }
  // Stops early when the server has closed, or no longer reads.
  void Send(const std::string& bytes);
  // Receives until the server closes, or nothing came for `quiet_ms`.
  std::string Receive(int quiet_ms, bool* closed);
  // From now on destroying it resets the connection, as when a client dies with unread data.
  void Reset();

 private:
  const int fd_;
  bool connected_ = false;
};

inline constexpr uint8_t kData = 0, kHeaders = 1, kSettings = 4, kPing = 6, kGoAway = 7,
                         kWindowUpdate = 8, kContinuation = 9;
inline constexpr uint8_t kEndStream = 1, kAck = 1, kEndHeaders = 4;

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload);
std::string Header(const std::string& name, const std::string& value);

// The client's preface and settings.
std::string Hello();
// Headers of a call.
std::string CallHeaders(const std::string& method = "awqd.v1.QuantizedInference/QuantizedMatmul");
// A gRPC message whose length field is `claimed`.
std::string Message(uint32_t claimed, const std::string& payload);

struct ReceivedFrame {
  uint8_t type = 0, flags = 0;
  uint32_t stream = 0;
  std::string payload;
};
// Removes the first frame from `frames`; nullopt if it is not complete.
std::optional<ReceivedFrame> TakeFrame(absl::string_view* frames);
// Payloads of the frames of one type in a byte stream of frames.
std::string PayloadsOf(uint8_t type, const std::string& frames);

}  // namespace awqd
