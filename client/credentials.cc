// Files of certificates and tokens into what gRPC takes.
#include "client/credentials.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"

namespace awqd::client {
namespace {

absl::Status Refused(absl::string_view name, const std::string& path, absl::string_view expected) {
  return Invalid(name, ": got '", path, "', expected ", expected);
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
  AWQD_ASSIGN_OR_RETURN(options.pem_root_certs, ReadPem("tls_ca", security.tls_ca, "CERTIFICATE"));
  if (security.tls_cert.empty()) return options;
  AWQD_ASSIGN_OR_RETURN(std::string cert, ReadPem("tls_cert", security.tls_cert, "CERTIFICATE"));
  AWQD_ASSIGN_OR_RETURN(std::string key, ReadPem("tls_key", security.tls_key, "PRIVATE KEY"));
  options.pem_cert_chain = std::move(cert);
  options.pem_private_key = std::move(key);
  return options;
}

absl::Status Check(const std::string& address, const Security& security, bool tls) {
  if (security.tls_cert.empty() != security.tls_key.empty()) {
    return Invalid("tls_cert and tls_key: got one, expected both or none");
  }
  if (!security.tls_cert.empty() && security.tls_ca.empty()) {
    return Invalid("tls_ca: got none beside tls_cert, expected a file of CAs");
  }
  if (security.token_file.empty() || tls || security.insecure_token || OnThisMachine(address)) {
    return absl::OkStatus();
  }
  return Invalid("token_file: got one for ", address,
                 " without tls_ca, expected TLS, an address of this "
                 "machine, or insecure_token: without TLS everybody on the way can read the token");
}

}  // namespace

absl::StatusOr<Credentials> Credentials::Read(const std::string& address,
                                              const Security& security) {
  const bool tls = !security.tls_ca.empty() && !absl::StartsWith(address, "unix:");
  AWQD_RETURN_IF_ERROR(Check(address, security, tls));
  Credentials out;
  if (tls) {
    AWQD_ASSIGN_OR_RETURN(const grpc::SslCredentialsOptions options, ReadTls(security));
    out.channel_ = grpc::SslCredentials(options);
  } else {
    out.channel_ = grpc::InsecureChannelCredentials();
  }
  out.tls_ = tls;
  out.has_certificate_ = !security.tls_cert.empty();
  if (!security.token_file.empty()) {
    AWQD_ASSIGN_OR_RETURN(const std::string token, ReadToken(security.token_file));
    out.authorization_ = absl::StrCat("Bearer ", token);
  }
  return out;
}

absl::Status Credentials::WithQuestion(const absl::Status& status) const {
  const std::string text = absl::AsciiStrToLower(status.message());
  const auto has = [&text](std::initializer_list<absl::string_view> words) {
    return std::any_of(words.begin(), words.end(),
                       [&text](absl::string_view word) { return absl::StrContains(text, word); });
  };
  // gRPC 1.51 and 1.83 say so while no connection stands.
  if (!absl::IsUnavailable(status) || !has({"failed to connect"})) return status;
  const bool closed = has({"socket closed", "connection reset", "end of tcp stream"});
  absl::string_view question;
  if (!tls_ && closed) {
    question = "does the server speak TLS? Then give tls_ca";
  } else if (tls_ && has({"wrong version number", "wrong_version_number"})) {
    question = "does the server speak TLS? Without tls_ca the connection is plaintext";
  } else if (tls_ && has({"verify failed", "verify_failed"})) {
    question = "does tls_ca hold the CA of the server's certificate?";
  } else if (tls_ && closed) {
    question = has_certificate_ ? "does the server trust the CA of tls_cert?"
                                : "does the server ask for a certificate (tls_cert, tls_key), or "
                                  "speak no TLS?";
  } else {
    return status;
  }
  absl::Status out(status.code(), absl::StrCat(status.message(), "; ", question));
  status.ForEachPayload(
      [&out](absl::string_view url, const absl::Cord& payload) { out.SetPayload(url, payload); });
  return out;
}

}  // namespace awqd::client
