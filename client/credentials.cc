// Files of certificates and tokens into what gRPC takes.
#include "client/credentials.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace awqd::client {
namespace {

absl::Status Refused(absl::string_view name, const std::string& path, absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": got '", path, "', expected ", expected));
}

absl::StatusOr<std::string> ReadFile(absl::string_view name, const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file && text << file.rdbuf()) return text.str();
  return Refused(
      name, path,
      absl::StrCat("a file that can be read: ", errno == 0 ? "it is empty" : std::strerror(errno)));
}

// gRPC's own complaint of a file without one names no file.
absl::StatusOr<std::string> ReadPem(absl::string_view name, const std::string& path,
                                    absl::string_view label) {
  absl::StatusOr<std::string> text = ReadFile(name, path);
  if (!text.ok() || absl::StrContains(*text, absl::StrCat(label, "-----"))) return text;
  return Refused(name, path, absl::StrCat("PEM with a ", absl::AsciiStrToLower(label)));
}

bool OnThisMachine(absl::string_view address) {
  for (const absl::string_view prefix : {"unix:", "localhost:", "127.", "[::1]:"}) {
    if (!absl::StartsWith(address, prefix)) continue;
    // 127.example.org is somebody else's.
    return prefix != "127." ||
           address.substr(0, address.rfind(':')).find_first_not_of("0123456789.") ==
               absl::string_view::npos;
  }
  return false;
}

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile("token_file", path);
  if (!text.ok()) return text;
  const std::string token(absl::StripAsciiWhitespace(*text));
  if (token.empty() || !std::all_of(token.begin(), token.end(), absl::ascii_isgraph)) {
    return Refused("token_file", path, "one token, as awqctl token prints it");
  }
  return token;
}

absl::StatusOr<grpc::SslCredentialsOptions> ReadTls(const Security& security) {
  grpc::SslCredentialsOptions options;
  absl::StatusOr<std::string> ca = ReadPem("tls_ca", security.tls_ca, "CERTIFICATE");
  if (!ca.ok()) return ca.status();
  options.pem_root_certs = *std::move(ca);
  if (security.tls_cert.empty()) return options;
  absl::StatusOr<std::string> cert = ReadPem("tls_cert", security.tls_cert, "CERTIFICATE");
  if (!cert.ok()) return cert.status();
  absl::StatusOr<std::string> key = ReadPem("tls_key", security.tls_key, "PRIVATE KEY");
  if (!key.ok()) return key.status();
  options.pem_cert_chain = *std::move(cert);
  options.pem_private_key = *std::move(key);
  return options;
}

absl::Status Check(const std::string& address, const Security& security, bool tls) {
  if (security.tls_cert.empty() != security.tls_key.empty()) {
    return absl::InvalidArgumentError("tls_cert and tls_key: got one, expected both or none");
  }
  if (!security.tls_cert.empty() && security.tls_ca.empty()) {
    return absl::InvalidArgumentError("tls_ca: got none beside tls_cert, expected a file of CAs");
  }
  if (security.token_file.empty() || tls || security.insecure_token || OnThisMachine(address)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "token_file: got one for ", address,
      " without tls_ca, expected TLS, an address of this "
      "machine, or insecure_token: without TLS everybody on the way can read the token"));
}

}  // namespace

absl::StatusOr<Credentials> Credentials::Read(const std::string& address,
                                              const Security& security) {
  const bool tls = !security.tls_ca.empty() && !absl::StartsWith(address, "unix:");
  if (absl::Status status = Check(address, security, tls); !status.ok()) return status;
  Credentials out;
  if (tls) {
    const absl::StatusOr<grpc::SslCredentialsOptions> options = ReadTls(security);
    if (!options.ok()) return options.status();
    out.channel_ = grpc::SslCredentials(*options);
  } else {
    out.channel_ = grpc::InsecureChannelCredentials();
  }
  if (!security.token_file.empty()) {
    const absl::StatusOr<std::string> token = ReadToken(security.token_file);
    if (!token.ok()) return token.status();
    out.authorization_ = absl::StrCat("Bearer ", *token);
  }
  return out;
}

}  // namespace awqd::client
