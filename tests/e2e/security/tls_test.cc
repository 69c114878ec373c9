// TLS of the real server: its versions, the files that it refuses, and the certificates that a
// client must trust.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/e2e/security/security_fixture.h"
#include "tests/server/obs/http_get.h"
#include "tests/testing/eventually.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct FreeTls {
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  void operator()(SSL* connection) const { SSL_free(connection); }
};

// The version of TLS that an OpenSSL client with this version alone agrees on with the server;
// empty without agreement.
std::string Handshake(const std::string& address, int version) {
  int port = 0;
  if (!absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port)) return "bad address";
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(static_cast<uint16_t>(port))};
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  signal(SIGPIPE, SIG_IGN);  // the server may close while OpenSSL writes
  std::string agreed;
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0) {
    const std::unique_ptr<SSL_CTX, FreeTls> context(SSL_CTX_new(TLS_client_method()));
    // Otherwise OpenSSL itself would not offer the old versions.
    SSL_CTX_set_security_level(context.get(), 0);
    SSL_CTX_set_min_proto_version(context.get(), version);
    SSL_CTX_set_max_proto_version(context.get(), version);
    const unsigned char protocols[] = {2, 'h', '2'};
    SSL_CTX_set_alpn_protos(context.get(), protocols, sizeof(protocols));
    const std::unique_ptr<SSL, FreeTls> connection(SSL_new(context.get()));
    SSL_set_fd(connection.get(), fd);
    if (SSL_connect(connection.get()) == 1) agreed = SSL_get_version(connection.get());
  }
  close(fd);
  return agreed;
}

class TlsTest : public SecurityTest {
 protected:
  // Starts with these files, which the server must refuse with a line that has `says`.
  void ExpectRefused(const std::vector<std::string>& args, const std::string& says) const {
    std::vector<std::string> all = Args(args);
    all.push_back("--address=127.0.0.1:0");
    const ExitReport report = RunProgram(BinaryPath("awqd"), all);
    EXPECT_TRUE(report.exited);
    EXPECT_EQ(report.code, 1) << report.log;
    EXPECT_THAT(report.log, HasSubstr(says));
  }
  // The log may lag behind.
  static void ExpectLogged(const ServerProcess& server, const std::string& text) {
    EXPECT_TRUE(Eventually([&] { return absl::StrContains(server.log(), text); })) << server.log();
  }
};

TEST_F(TlsTest, SpeaksTwelveAndThirteenAndNothingOlder) {
  const auto server = Start(TlsArgs({}), true);
  EXPECT_EQ(Handshake(server->address(), TLS1_3_VERSION), "TLSv1.3");
  EXPECT_EQ(Handshake(server->address(), TLS1_2_VERSION), "TLSv1.2");
  EXPECT_EQ(Handshake(server->address(), TLS1_1_VERSION), "");
  EXPECT_EQ(Handshake(server->address(), TLS1_VERSION), "");
  EXPECT_EQ(server->Stop().code, 0);
}

TEST_F(TlsTest, BadFilesFailTheStartWithTheirNames) {
  const std::string cert = "--tls_cert=" + cert_path_, key = "--tls_key=" + key_path_;
  const std::string bad = folder_ / "bad.pem";
  WriteFile(bad, "-----BEGIN CERTIFICATE-----\nhello\n-----END CERTIFICATE-----\n");
  ExpectRefused({"--tls_cert=" + bad, key}, absl::StrCat("--tls_cert: got \"", bad, "\""));
  ExpectRefused({cert, "--tls_key=" + bad}, absl::StrCat("--tls_key: got \"", bad, "\""));
  ExpectRefused({cert, key, "--tls_client_ca=" + bad},
                absl::StrCat("--tls_client_ca: got \"", bad, "\""));
  ExpectRefused({cert, key, "--tokens=" + bad}, absl::StrCat("--tokens: \"", bad, "\": line 1"));
  const std::string absent = folder_ / "absent.pem";
  ExpectRefused({"--tls_cert=" + absent, key}, absl::StrCat("cannot read \"", absent, "\""));
  ExpectRefused({cert, key, "--tokens=" + absent}, absl::StrCat("cannot read \"", absent, "\""));
  const CertifiedKey other = ca_.Issue({.common_name = "server"});
  WriteFile(bad, other.key);
  ExpectRefused({cert, "--tls_key=" + bad}, "expected the key of the first certificate in");
}

TEST_F(TlsTest, AClientTrustsItsCaAndNoOther) {
  const auto server = Start(TlsArgs({}), true);
  server->set_security({.tls_ca = client_ca_path_});
  EXPECT_TRUE(absl::IsUnavailable(server->NewClient()->GetServerInfo().status()));
  server->set_security({});
  EXPECT_TRUE(absl::IsUnavailable(server->NewClient()->GetServerInfo().status())) << "in plaintext";
  server->set_security({.tls_ca = ca_path_});
  EXPECT_TRUE(server->NewClient()->GetServerInfo().ok());
}

// An operator sees who is refused, in the log and in metrics.
TEST_F(TlsTest, RefusedConnectionsAreLoggedAndCounted) {
  const auto server = std::make_unique<ServerProcess>(
      TlsArgs({"--tls_client_ca=" + client_ca_path_, "--metrics_address=127.0.0.1:0"}));
  const Caller ann = Certified("ann", client_ca_.Issue({.common_name = "ann"}));
  server->set_security({.tls_ca = ca_path_, .tls_cert = ann.tls_cert, .tls_key = ann.tls_key});
  ASSERT_TRUE(server->WaitServing()) << server->log();
  ExpectLogged(*server, "metrics address=");
  const std::string log = server->log();
  int metrics = 0;
  ASSERT_TRUE(absl::SimpleAtoi(log.substr(log.find("metrics address=127.0.0.1:0 port=") + 33, 5),
                               &metrics));
  const auto refused = [&](const std::string& reason) {
    const std::string series =
        absl::StrCat("awqd_connections_refused_total{reason=\"", reason, "\"} ");
    const std::string text = testing::HttpGet(metrics, "/metrics").body;
    const size_t at = text.find(series);
    return at == text.npos
               ? std::string("absent")
               : text.substr(at + series.size(), text.find('\n', at) - at - series.size());
  };
  EXPECT_EQ(refused("tls_handshake"), "0");
  server->set_security({.tls_ca = ca_path_});
  EXPECT_THAT(std::string(server->NewClient()->GetServerInfo().status().message()),
              HasSubstr("does the server ask for a certificate (tls_cert, tls_key)"));
  EXPECT_NE(refused("tls_handshake"), "0");
  ExpectLogged(*server, "TLS handshake failed reason=");
  // OpenSSL and BoringSSL spell it differently.
  EXPECT_THAT(absl::AsciiStrToLower(server->log()),
              ::testing::ContainsRegex("reason=\"?peer.did.not.return.a.certificate.*"
                                       "peer=127.0.0.1"));
  server->set_security({});
  EXPECT_THAT(std::string(server->NewClient()->GetServerInfo().status().message()),
              HasSubstr("does the server speak TLS? Then give tls_ca"));
  EXPECT_NE(refused("plaintext"), "0");
  ExpectLogged(*server, "connection refused: plaintext on a port that speaks TLS");
  EXPECT_EQ(server->Stop().code, 0);
}

TEST_F(TlsTest, TlsOnAPlaintextPortIsLoggedAndTheClientAsks) {
  const auto server = Start(Args({}), false);
  server->set_security({.tls_ca = ca_path_});
  EXPECT_THAT(std::string(server->NewClient()->GetServerInfo().status().message()),
              HasSubstr("does the server speak TLS? Without tls_ca"));
  ExpectLogged(*server, "connection refused: TLS on a port that speaks plaintext");
}

TEST_F(TlsTest, WarnsOfACertificateThatExpiresSoon) {
  const auto write = [&](int64_t days) {
    const CertifiedKey own = ca_.Issue({.common_name = "server",
                                        .alternative_names = "IP:127.0.0.1",
                                        .valid_until_s = days * 86400});
    WriteFile(cert_path_, own.certificate);
    WriteFile(key_path_, own.key);
  };
  write(20);
  const auto server = Start(TlsArgs({}), true);
  EXPECT_THAT(server->log(), Not(HasSubstr("certificate expires soon")));
  write(3);
  ExpectLogged(*server, "the server's certificate expires soon expires=");
  EXPECT_EQ(server->Stop().code, 0);
}

TEST_F(TlsTest, ClientsThatLeaveInTheMiddleOfAHandshakeLeaveNothing) {
  const auto server = Start(TlsArgs({}), true);
  const int before = server->open_files();
  for (int i = 0; i < 50; ++i) EXPECT_EQ(Handshake(server->address(), TLS1_1_VERSION), "");
  EXPECT_LE(server->OpenFilesAgain(before), before);
  EXPECT_TRUE(server->NewClient()->GetServerInfo().ok());
  EXPECT_EQ(server->Stop().code, 0);
}

}  // namespace
}  // namespace awqd
