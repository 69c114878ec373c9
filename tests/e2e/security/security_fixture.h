// SecurityTest: files of certificates and tokens, and clients of every kind, for tests of the real
// server.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "grpcpp/channel.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_process.h"
#include "tests/testing/certificates.h"

namespace awqd {

// Replaces the file atomically.
void WriteFile(const std::string& path, const std::string& text);

// "ian infer sha256:..." for a token.
std::string TokenLine(const std::string& name, const std::string& roles, const std::string& token);

// A caller: the credentials of its connection and its calls. Empty paths and texts mean none.
struct Caller {
  std::string name;  // for messages
  std::string tls_ca = "", tls_cert = "", tls_key = "";
  std::string token = "";
};

// A connection of its own whose calls carry the caller's token.
std::shared_ptr<grpc::Channel> Connect(const std::string& address, const Caller& caller);

class SecurityTest : public ::testing::Test {
 protected:
  SecurityTest();

  // Writes `NAME.pem` and `NAME.key`, and returns the caller with this certificate.
  Caller Certified(const std::string& name, const CertifiedKey& identity) const;
  // The arguments for TLS, with an empty repository.
  std::vector<std::string> Args(std::vector<std::string> more) const;
  std::vector<std::string> TlsArgs(std::vector<std::string> more) const;
  // Waits until the server serves, over TLS if `tls`.
  std::unique_ptr<ServerProcess> Start(std::vector<std::string> args, bool tls,
                                       const std::string& address = "127.0.0.1:0") const;

  TempFolder folder_;
  const CertificateAuthority ca_{"ca of servers"}, client_ca_{"ca of clients"};
  const std::string ca_path_ = folder_ / "ca.pem", client_ca_path_ = folder_ / "client_ca.pem";
  const std::string cert_path_ = folder_ / "server.pem", key_path_ = folder_ / "server.key";
  const std::string tokens_path_ = folder_ / "tokens";
};

}  // namespace awqd
