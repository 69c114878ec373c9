// Prints addresses, networks and users.
#include "server/obs/origin.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"

namespace awqd::obs {
namespace {

// The IPv4 address that is mapped into an IPv6 one, or the network of the IPv6 address.
std::string PrintNetwork(in6_addr address) {
  if (IN6_IS_ADDR_V4MAPPED(&address)) return PrintAddress(AF_INET, &address.s6_addr[12]);
  std::fill(address.s6_addr + 8, address.s6_addr + 16, 0);
  return absl::StrCat(PrintAddress(AF_INET6, &address), "/64");
}

}  // namespace

std::string PrintAddress(int family, const void* address) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(family, address, text, sizeof(text));
  return text;
}

std::string Origin(int fd, const sockaddr_storage& peer) {
  if (peer.ss_family == AF_INET) {
    return PrintAddress(AF_INET, &reinterpret_cast<const sockaddr_in&>(peer).sin_addr);
  }
  if (peer.ss_family == AF_INET6) {
    return PrintNetwork(reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr);
  }
  ucred user = {};
  socklen_t size = sizeof(user);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &user, &size) != 0) return "user unknown";
  return absl::StrCat("user ", user.uid);
}

std::string Origin(int fd) {
  sockaddr_storage peer = {};
  socklen_t size = sizeof(peer);
  const bool there = getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0;
  return there ? Origin(fd, peer) : "";
}

std::string PeerHost(absl::string_view peer) {
  if (absl::StartsWith(peer, "unix")) return "unix";
  const absl::string_view host = peer.substr(0, peer.rfind(':'));
  absl::string_view text = host;
  if (!absl::ConsumePrefix(&text, "ipv6:")) return std::string(host);
  // gRPC escapes the brackets.
  std::string address = absl::StrReplaceAll(text, {{"%5B", ""}, {"%5D", ""}, {"[", ""}, {"]", ""}});
  address.resize(std::min(address.find('%'), address.size()));  // without the zone
  in6_addr bytes = {};
  if (inet_pton(AF_INET6, address.c_str(), &bytes) != 1) return std::string(host);
  return absl::StrCat(IN6_IS_ADDR_V4MAPPED(&bytes) ? "ipv4:" : "ipv6:", PrintNetwork(bytes));
}

}  // namespace awqd::obs
