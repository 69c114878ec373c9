// Sockets and frames.
#include "tests/e2e/http2.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace awqd {
namespace {

constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

std::string HpackString(const std::string& text) {
  std::string out;
  size_t size = text.size();
  if (size < 127) {
    out.push_back(static_cast<char>(size));
    return absl::StrCat(out, text);
  }
  out.push_back(127);
  for (size -= 127; size >= 128; size >>= 7) out.push_back(static_cast<char>(size % 128 + 128));
  out.push_back(static_cast<char>(size));
  return absl::StrCat(out, text);
}

}  // namespace

int PortOf(const std::string& address) {
  int port = 0;
  return absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port) ? port : 0;
}

Socket::Socket(int port) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0;
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

Socket::~Socket() { close(fd_); }

void Socket::Send(const std::string& bytes) {
  size_t sent = 0;
  while (sent < bytes.size()) {
    pollfd poll_fd = {.fd = fd_, .events = POLLOUT};
    if (poll(&poll_fd, 1, 2000) <= 0) return;
    const ssize_t n =
        send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n <= 0) return;
    sent += static_cast<size_t>(n);
  }
}

std::string Socket::Receive(int quiet_ms, bool* closed) {
  std::string all;
  char block[65536];
  *closed = false;
  for (;;) {
    pollfd poll_fd = {.fd = fd_, .events = POLLIN};
    if (poll(&poll_fd, 1, quiet_ms) <= 0) return all;
    const ssize_t n = recv(fd_, block, sizeof(block), 0);
    if (n <= 0) {
      *closed = true;
      return all;
    }
    all.append(block, static_cast<size_t>(n));
  }
}

void Socket::Reset() {
  const linger hard = {.l_onoff = 1, .l_linger = 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
}

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload) {
  const size_t size = payload.size();
  std::string out;
  for (int shift : {16, 8, 0}) out.push_back(static_cast<char>(size >> shift));
  out.push_back(static_cast<char>(type));
  out.push_back(static_cast<char>(flags));
  for (int shift : {24, 16, 8, 0}) out.push_back(static_cast<char>(stream >> shift));
  return absl::StrCat(out, payload);
}

std::string Header(const std::string& name, const std::string& value) {
  return absl::StrCat(absl::string_view("\0", 1), HpackString(name), HpackString(value));
}

std::string CallHeaders(const std::string& method) {
  return absl::StrCat(Header(":method", "POST"), Header(":scheme", "http"),
                      Header(":path", "/" + method), Header(":authority", "localhost"),
                      Header("te", "trailers"), Header("content-type", "application/grpc"));
}

std::string Hello() { return absl::StrCat(kPreface, Frame(kSettings, 0, 0, "")); }

std::string Message(uint32_t claimed, const std::string& payload) {
  std::string out(1, '\0');
  for (int shift : {24, 16, 8, 0}) out.push_back(static_cast<char>(claimed >> shift));
  return absl::StrCat(out, payload);
}

std::optional<ReceivedFrame> TakeFrame(absl::string_view* frames) {
  constexpr size_t kHead = 9;
  if (frames->size() < kHead) return std::nullopt;
  const absl::string_view head = frames->substr(0, kHead);
  const auto number = [&](size_t begin, size_t end) {
    uint32_t out = 0;
    for (size_t i = begin; i < end; ++i) out = out << 8 | static_cast<uint8_t>(head[i]);
    return out;
  };
  const size_t size = number(0, 3);
  if (frames->size() < kHead + size) return std::nullopt;
  const absl::string_view payload = frames->substr(kHead, size);
  frames->remove_prefix(kHead + size);
  return ReceivedFrame{static_cast<uint8_t>(head[3]), static_cast<uint8_t>(head[4]), number(5, 9),
                       std::string(payload)};
}

std::string PayloadsOf(uint8_t type, const std::string& frames) {
  std::string data;
  absl::string_view rest = frames;
  while (const auto frame = TakeFrame(&rest)) {
    if (frame->type == type) data += frame->payload;
  }
  return data;
}

}  // namespace awqd
