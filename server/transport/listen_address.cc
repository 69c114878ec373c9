// Checks what a person wrote before gRPC sees it, whose own errors name no reason.
#include "server/transport/listen_address.h"

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
