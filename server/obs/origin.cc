// Prints addresses, networks and users.
#include "server/obs/origin.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace awqd::obs {
namespace {

std::string Print(int family, const void* address) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(family, address, text, sizeof(text));
  return text;
}

}  // namespace

std::string Origin(int fd, const sockaddr_storage& peer) {
  if (peer.ss_family == AF_INET) {
    return Print(AF_INET, &reinterpret_cast<const sockaddr_in&>(peer).sin_addr);
  }
  if (peer.ss_family == AF_INET6) {
    in6_addr address = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(&address)) return Print(AF_INET, &address.s6_addr[12]);
    std::fill(address.s6_addr + 8, address.s6_addr + 16, 0);
    return absl::StrCat(Print(AF_INET6, &address), "/64");
  }
  ucred user = {};
  socklen_t size = sizeof(user);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &user, &size) != 0) return "user unknown";
  return absl::StrCat("user ", user.uid);
}

}  // namespace awqd::obs
