// awqctl token: a new secret each time, and the line for the file of tokens.
#include <openssl/evp.h>

#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/awqctl/commands.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd::awqctl {
namespace {

using testing::HasSubstr;
using testing::Not;

struct Result {
  int code = 0;
  std::string out, err;
};

Result Awqctl(const std::vector<std::string>& args) {
  std::ostringstream out, err;
  Console console{out, err, false};
  const int code = RunAwqctl(args, console);
  return {code, out.str(), err.str()};
}

std::string HexSha256(const std::string& text) {
  std::string digest(EVP_MAX_MD_SIZE, '\0');
  unsigned int size = 0;
  EVP_Digest(text.data(), text.size(), reinterpret_cast<unsigned char*>(digest.data()), &size,
             EVP_sha256(), nullptr);
  return absl::BytesToHexString(absl::string_view(digest).substr(0, size));
}

TEST(AwqctlToken, PrintsTheTokenOnceAndTheLine) {
  std::set<std::string> tokens;
  for (int i = 0; i < 100; ++i) {
    const Result result = Awqctl({"token", "alice", "--roles", "infer,read"});
    ASSERT_EQ(result.code, kOk) << result.err;
    const std::string token = result.out.substr(0, result.out.size() - 1);
    EXPECT_EQ(result.out, token + "\n");
    EXPECT_EQ(token.substr(0, 5), "awqd_");
    EXPECT_EQ(token.size(), 5 + 64u);
    EXPECT_THAT(result.err, Not(HasSubstr(token)));
    EXPECT_THAT(result.err, HasSubstr("alice infer,read sha256:" + HexSha256(token) + "\n"));
    EXPECT_TRUE(tokens.insert(token).second);
  }
}

TEST(AwqctlToken, AsJson) {
  const Result result = Awqctl({"--json", "token", "a", "--roles", "admin"});
  const std::vector<std::string> parts = absl::StrSplit(result.out, '"');
  ASSERT_EQ(parts.size(), 9u) << result.out;
  EXPECT_EQ(parts[7], "a admin sha256:" + HexSha256(parts[3]));
  EXPECT_EQ(result.err, "");
}

TEST(AwqctlToken, RefusesWhatTheServerWould) {
  EXPECT_EQ(Awqctl({"token", "a"}).code, kBadArguments);
  EXPECT_EQ(Awqctl({"token", "--roles", "read"}).code, kBadArguments);
  EXPECT_THAT(Awqctl({"token", "a", "--roles", "read,root"}).err, HasSubstr("root"));
  for (const std::string& name : {std::string("a b"), std::string("a/b"), std::string(65, 'a')}) {
    const Result result = Awqctl({"token", name, "--roles", "read"});
    EXPECT_EQ(result.code, kBadArguments);
    EXPECT_THAT(result.err, HasSubstr("at most 64 letters"));
    EXPECT_EQ(result.out, "");
  }
}

TEST(AwqctlSecurity, FilesComeFromFlagsAndFromTheEnvironment) {
  const auto security = [](const std::vector<std::string>& args) {
    std::ostringstream out, err;
    int exit_code = kOk;
    const auto flags = ParseFlags(args, out, err, exit_code);
    EXPECT_TRUE(flags.has_value()) << err.str();
    return flags->security;
  };
  EXPECT_EQ(security({"status"}).token_file, "");
  const client::Security given =
      security({"status", "--tls_ca", "a", "--tls_cert", "b", "--tls_key", "c", "--token_file", "d",
                "--insecure_token"});
  EXPECT_EQ(given.tls_ca + given.tls_cert + given.tls_key + given.token_file, "abcd");
  EXPECT_TRUE(given.insecure_token);
  const std::pair<const char*, const char*> variables[] = {{"AWQD_TLS_CA", "e"},
                                                           {"AWQD_CLIENT_CERT", "f"},
                                                           {"AWQD_CLIENT_KEY", "g"},
                                                           {"AWQD_TOKEN_FILE", "h"},
                                                           {"AWQD_TLS_CERT", "the server's"}};
  for (const auto& [name, value] : variables) setenv(name, value, 1);
  const client::Security found = security({"status"});
  for (const auto& [name, value] : variables) unsetenv(name);
  EXPECT_EQ(found.tls_ca + found.tls_cert + found.tls_key + found.token_file, "efgh");
}

TEST(AwqctlSecurity, AFileThatCannotWorkIsABadArgument) {
  const Result result = Awqctl({"--tls_ca", "/absent", "status"});
  EXPECT_EQ(result.code, kBadArguments);
  EXPECT_THAT(result.err, HasSubstr("tls_ca: got '/absent'"));
  EXPECT_EQ(Awqctl({"--tls_ca", "/absent", "token", "a", "--roles", "read"}).code, kOk)
      << "a command that asks no server";
}

}  // namespace
}  // namespace awqd::awqctl
