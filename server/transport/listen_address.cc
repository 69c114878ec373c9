// Checks what a person wrote before gRPC sees it, whose own errors name no reason.
#include "server/transport/listen_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/obs/logging.h"

namespace awqd::transport {
namespace {

absl::Status Refused(absl::string_view text, absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("got \"", obs::LogText(text), "\", expected ", expected));
}

// Clients write the path as part of a URI, where these mean something else.
bool MeansSomethingInUris(char c) {
  return c == '%' || c == '?' || c == '#' || static_cast<unsigned char>(c) <= ' ' || c == '\x7f';
}

absl::StatusOr<ListenAddress> ParseSocket(absl::string_view text, absl::string_view path) {
  if (absl::ConsumePrefix(&path, "//") && path.substr(0, 1) != "/") {
    return Refused(text, "unix:path or unix:///path, without a host");
  }
  if (path.empty() || path.back() == '/') return Refused(text, "unix: and the path of a socket");
  for (const char c : path) {
    if (!MeansSomethingInUris(c)) continue;
    return Refused(text, "a socket path without blanks, control characters and % ? #");
  }
  if (path.size() > kMaxSocketPathBytes) {
    return absl::InvalidArgumentError(absl::StrCat("got a socket path of ", path.size(),
                                                   " bytes, expected at most ", kMaxSocketPathBytes,
                                                   ", the kernel's limit"));
  }
  return ListenAddress{.text = absl::StrCat("unix:", path), .socket_path = std::string(path)};
}

}  // namespace

bool ListenAddress::local() const {
  if (!socket_path.empty()) return true;
  std::string host = text.substr(0, text.rfind(':'));
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  in_addr v4 = {};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6 = {};
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost";
}

absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text) {
  if (absl::string_view path = text; absl::ConsumePrefix(&path, "unix:")) {
    return ParseSocket(text, path);
  }
  const size_t colon = text.rfind(':');
  int port = -1;
  if (colon != absl::string_view::npos && colon != 0 &&
      absl::SimpleAtoi(text.substr(colon + 1), &port) && port >= 0 && port <= 65535) {
    return ListenAddress{.text = std::string(text)};
  }
  return Refused(text, "host:port with a port of 0 to 65535, or unix:/path");
}

}  // namespace awqd::transport
