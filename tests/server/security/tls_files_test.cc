// Valid and invalid certificates and keys of a server.
#include "server/security/tls_files.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/certificates.h"

namespace awqd::security {
namespace {

using ::testing::HasSubstr;

class TlsFilesTest : public ::testing::Test {
 protected:
  TlsFilesTest() {
    options_.tls_cert = "/c/cert.pem";
    options_.tls_key = "/c/key.pem";
  }
  std::string Refusal(const std::vector<std::string>& contents) const {
    const absl::Status status = CheckTls(options_, contents).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  }

  Options options_;
  const CertificateAuthority ca_{"ca"};
  const CertifiedKey server_ = ca_.Issue({.common_name = "server"});
};

TEST_F(TlsFilesTest, TakesWhatFits) {
  EXPECT_THAT(TlsPaths(options_), ::testing::ElementsAre("/c/cert.pem", "/c/key.pem"));
  const auto files = CheckTls(options_, {server_.certificate, server_.key});
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_EQ(files->certificates, server_.certificate);
  EXPECT_EQ(files->client_ca, "");
  // A chain with text between, as some tools write it.
  EXPECT_TRUE(CheckTls(options_, {absl::StrCat("subject: x\n", server_.certificate, "issuer:\n",
                                               ca_.certificate()),
                                  server_.key})
                  .ok());
  options_.tls_client_ca = "/c/ca.pem";
  EXPECT_EQ(TlsPaths(options_).size(), 3u);
  EXPECT_TRUE(CheckTls(options_, {server_.certificate, server_.key, ca_.certificate()}).ok());
}

TEST_F(TlsFilesTest, AnExpiredCertificateIsTaken) {
  const CertifiedKey old = ca_.Issue({.common_name = "server", .valid_until_s = -60});
  EXPECT_TRUE(CheckTls(options_, {old.certificate, old.key}).ok());
}

TEST_F(TlsFilesTest, KnowsTheFirstExpiryOfAChain) {
  const auto left = [&](const std::string& certificates) {
    const auto files = CheckTls(options_, {certificates, server_.key});
    EXPECT_TRUE(files.ok()) << files.status();
    return absl::ToInt64Minutes(files->expiry - absl::Now() + absl::Seconds(30));
  };
  EXPECT_EQ(left(server_.certificate), 60);
  const CertifiedKey sooner = ca_.Issue({.common_name = "intermediate", .valid_until_s = 1800});
  EXPECT_EQ(left(server_.certificate + sooner.certificate), 30);
}

TEST_F(TlsFilesTest, NamesTheFileThatIsWrong) {
  for (const std::string& bad : {std::string(), std::string("hello\n"), server_.key,
                                 server_.certificate.substr(0, server_.certificate.size() / 2),
                                 absl::StrCat(server_.certificate, "-----BEGIN CERTIFICATE-----\n",
                                              "AAAA\n-----END CERTIFICATE-----\n")}) {
    EXPECT_THAT(Refusal({bad, server_.key}), HasSubstr("--tls_cert: got \"/c/cert.pem\"")) << bad;
  }
  for (const std::string& bad : {std::string(), std::string("hello\n"), server_.certificate}) {
    EXPECT_THAT(Refusal({server_.certificate, bad}), HasSubstr("--tls_key: got \"/c/key.pem\""));
  }
  options_.tls_client_ca = "/c/ca.pem";
  EXPECT_THAT(Refusal({server_.certificate, server_.key, "hello"}),
              HasSubstr("--tls_client_ca: got \"/c/ca.pem\""));
}

TEST_F(TlsFilesTest, CertificateAndKeyBelongTogether) {
  const CertifiedKey other = ca_.Issue({.common_name = "server"});
  EXPECT_THAT(Refusal({server_.certificate, other.key}),
              HasSubstr("the key of the first certificate in \"/c/cert.pem\""));
}

}  // namespace
}  // namespace awqd::security
