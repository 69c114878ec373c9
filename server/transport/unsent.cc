// Asks the kernel about each socket of the process.
#include "server/transport/unsent.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "absl/strings/numbers.h"

namespace awqd::transport {
namespace {

bool IsTcpConnection(int fd) {
  int protocol = 0, listening = 0;
  socklen_t size = sizeof(protocol);
  if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) != 0) return false;
  size = sizeof(listening);
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0) return false;
  return protocol == IPPROTO_TCP && listening == 0;
}

}  // namespace

bool AllSent() {
  std::error_code error;
  std::filesystem::directory_iterator files("/proc/self/fd", error);
  for (; !error && files != std::filesystem::directory_iterator(); files.increment(error)) {
    int fd = -1, unsent = 0;
    if (!absl::SimpleAtoi(files->path().filename().string(), &fd) || !IsTcpConnection(fd)) continue;
    if (ioctl(fd, SIOCOUTQ, &unsent) == 0 && unsent > 0) return false;
  }
  return true;
}

}  // namespace awqd::transport
