// Polls both ends on one thread.
#include "tests/e2e/transport/slow_link.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/http2.h"

namespace awqd {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int NewSocket() { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); }

// Small buffers, so that few bytes are under way.
int ConnectedTo(int port) {
  const int fd = NewSocket();
  const int bytes = SlowLink::kPieceBytes;
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
  const sockaddr_in address = Loopback(port);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
  close(fd);
  return -1;
}

// Moves up to `most` available bytes. Returns false at the end of the stream of `from`.
bool Move(int from, int to, int64_t most) {
  std::vector<char> bytes(static_cast<size_t>(most));
  const ssize_t got = recv(from, bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (got <= 0) return got < 0 && errno == EAGAIN;
  for (ssize_t sent = 0; sent < got;) {
    const ssize_t more =
        send(to, bytes.data() + sent, static_cast<size_t>(got - sent), MSG_NOSIGNAL);
    if (more <= 0) return false;
    sent += more;
  }
  return true;
}

}  // namespace

SlowLink::SlowLink(const std::string& server) : listener_(NewSocket()) {
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  if (bind(listener_, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      listen(listener_, 1) != 0 || pipe2(stop_, O_CLOEXEC) != 0 ||
      getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return;  // no client can connect, which the test will notice
  }
  address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  thread_ = std::thread([this, port = PortOf(server)] { Run(port); });
}

SlowLink::~SlowLink() {
  close(stop_[1]);
  if (thread_.joinable()) thread_.join();
  close(stop_[0]);
  close(listener_);
}

void SlowLink::Run(int server_port) {
  pollfd coming[] = {{.fd = listener_, .events = POLLIN}, {.fd = stop_[0], .events = POLLIN}};
  if (poll(coming, 2, -1) < 1 || coming[1].revents != 0) return;
  const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  const int server = ConnectedTo(server_port);
  absl::Time next = absl::Now();
  for (bool both = client >= 0 && server >= 0; both;) {
    const bool due = absl::Now() >= next;
    pollfd ends[] = {{.fd = client, .events = POLLIN},
                     {.fd = stop_[0], .events = POLLIN},
                     {.fd = due ? server : -1, .events = POLLIN}};
    const absl::Duration wait = due ? absl::Seconds(1) : next - absl::Now();
    poll(ends, 3, static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1);
    if (ends[1].revents != 0) break;
    if (ends[0].revents != 0) both = Move(client, server, kPieceBytes);
    if (both && ends[2].revents != 0) {
      both = Move(server, client, kPieceBytes);
      next = absl::Now() + kPiece;
    }
  }
  close(client);
  close(server);
}

}  // namespace awqd
