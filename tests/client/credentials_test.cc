// The files that a client reads, and secrets that it refuses to send.
#include "client/credentials.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "client/awqd_client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/certificates.h"

namespace awqd::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class CredentialsTest : public ::testing::Test {
 protected:
  ~CredentialsTest() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& text) const {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path) << text;
    return path;
  }
  static std::string Refusal(const std::string& address, const Security& security) {
    const absl::Status status = Credentials::Read(address, security).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(Client::Create({.address = address, .security = security}).status(), status);
    return std::string(status.message());
  }

  // Created before the files that are written into it below.
  static std::string MakeFolder() {
    std::string path = testing::TempDir() + "/awqd_credentials_" + std::to_string(getpid());
    std::filesystem::create_directories(path);
    return path;
  }

  const std::string folder_ = MakeFolder();
  const CertificateAuthority authority_{"ca"};
  const CertifiedKey identity_ = authority_.Issue({.common_name = "client"});
  const std::string ca_ = Write("ca.pem", authority_.certificate());
  const std::string cert_ = Write("cert.pem", identity_.certificate);
  const std::string key_ = Write("key.pem", identity_.key);
  const std::string token_ = Write("token", "awqd_secret\n");
};

TEST_F(CredentialsTest, TakesWhatFits) {
  for (const Security& security :
       {Security{}, Security{.tls_ca = ca_}, Security{.tls_ca = ca_, .token_file = token_},
        Security{.tls_ca = ca_, .tls_cert = cert_, .tls_key = key_, .token_file = token_}}) {
    const auto read = Credentials::Read("example.org:8001", security);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_NE(read->channel(), nullptr);
  }
}

TEST_F(CredentialsTest, ATokenStaysOnThisMachineWithoutTls) {
  const Security token = {.token_file = token_};
  for (const char* address : {"127.0.0.1:8001", "127.1.2.3:8001", "localhost:8001", "[::1]:8001",
                              "unix:/run/awqd.sock"}) {
    EXPECT_TRUE(Credentials::Read(address, token).ok()) << address;
  }
  for (const char* address :
       {"example.org:8001", "10.0.0.7:8001", "127.example.org:8001", "localhost.example.org:8001",
        "dns:///127.0.0.1:8001", "0.0.0.0:8001", "[::]:8001"}) {
    EXPECT_THAT(Refusal(address, token),
                AllOf(HasSubstr("without tls_ca"), Not(HasSubstr("secret"))));
  }
  EXPECT_TRUE(
      Credentials::Read("example.org:8001", {.token_file = token_, .insecure_token = true}).ok());
}

TEST_F(CredentialsTest, AsksAboutTlsWhereAConnectionLooksSo) {
  const auto ask = [&](const Security& security, const std::string& reason) {
    const absl::Status status =
        absl::UnavailableError("failed to connect to all addresses; last error: " + reason);
    const absl::Status asked =
        Credentials::Read("example.org:8001", security)->WithQuestion(status);
    EXPECT_TRUE(absl::IsUnavailable(asked));
    return std::string(asked.message().substr(status.message().size()));
  };
  const Security tls = {.tls_ca = ca_};
  const Security mutual = {.tls_ca = ca_, .tls_cert = cert_, .tls_key = key_};
  EXPECT_EQ(ask({}, "Socket closed"), "; does the server speak TLS? Then give tls_ca");
  EXPECT_EQ(ask({}, "recvmsg:Connection reset by peer"),
            "; does the server speak TLS? Then give tls_ca");
  EXPECT_EQ(ask({}, "Connection refused"), "");
  EXPECT_THAT(ask(tls, "SSL_ERROR_SSL: error:0A00010B:SSL routines::wrong version number"),
              HasSubstr("does the server speak TLS? Without tls_ca"));
  EXPECT_THAT(ask(tls, "OPENSSL_internal:WRONG_VERSION_NUMBER"), HasSubstr("Without tls_ca"));
  EXPECT_THAT(ask(tls, "certificate verify failed"), HasSubstr("does tls_ca hold the CA"));
  EXPECT_THAT(ask(tls, "Socket closed"), HasSubstr("ask for a certificate"));
  EXPECT_THAT(ask(mutual, "Socket closed"), HasSubstr("trust the CA of tls_cert"));
  const absl::Status other = absl::UnavailableError("Socket closed");
  EXPECT_EQ(Credentials::Read("example.org:8001", {})->WithQuestion(other), other);
}

TEST_F(CredentialsTest, NamesTheFileThatIsWrong) {
  const std::string address = "example.org:8001";
  const std::string absent = folder_ + "/absent";
  EXPECT_THAT(Refusal(address, {.tls_ca = absent}),
              AllOf(HasSubstr("tls_ca: got '" + absent), HasSubstr("No such file")));
  EXPECT_THAT(Refusal(address, {.tls_ca = folder_}), HasSubstr("a file that can be read"));
  EXPECT_THAT(Refusal(address, {.tls_ca = token_}),
              AllOf(HasSubstr("tls_ca: got '" + token_ + "', expected PEM with a certificate"),
                    Not(HasSubstr("secret"))));
  EXPECT_THAT(Refusal(address, {.tls_ca = ca_, .tls_cert = key_, .tls_key = key_}),
              HasSubstr("tls_cert: got '" + key_));
  EXPECT_THAT(Refusal(address, {.tls_ca = ca_, .tls_cert = cert_, .tls_key = cert_}),
              HasSubstr("tls_key: got '" + cert_));
  EXPECT_THAT(Refusal(address, {.tls_ca = ca_, .tls_cert = cert_}), HasSubstr("expected both"));
  EXPECT_THAT(Refusal(address, {.tls_cert = cert_, .tls_key = key_}),
              HasSubstr("tls_ca: got none"));
}

TEST_F(CredentialsTest, ATokenIsOneWord) {
  for (const char* text : {"", "\n", "two words", "tab\there", "a\nb", "caf\xc3\xa9"}) {
    const std::string path = Write("bad", text);
    EXPECT_THAT(Refusal("127.0.0.1:8001", {.token_file = path}),
                HasSubstr("token_file: got '" + path))
        << text;
  }
}

}  // namespace
}  // namespace awqd::client
