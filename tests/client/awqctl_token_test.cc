// awqctl token: a new secret each time, and the line for the file of tokens.
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/awqctl_command.h"

namespace awqd::awqctl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

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
    const CommandResult result = RunCommand({"token", "alice", "--roles", "infer,read"});
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
  const CommandResult result = RunCommand({"--json", "token", "a", "--roles", "admin"});
  const std::vector<std::string> parts = absl::StrSplit(result.out, '"');
  ASSERT_EQ(parts.size(), 9u) << result.out;
  EXPECT_EQ(parts[7], "a admin sha256:" + HexSha256(parts[3]));
  EXPECT_EQ(result.err, "");
}

TEST(AwqctlToken, WritesFilesForTheirOwnerAlone) {
  const awqd::testing::TempDirectory folder;
  const auto mode = [](const std::string& path) {
    struct stat facts = {};
    EXPECT_EQ(stat(path.c_str(), &facts), 0) << path;
    return facts.st_mode & 07777;
  };
  const auto text = [](const std::string& path) {
    std::ostringstream out;
    out << std::ifstream(path).rdbuf();
    return out.str();
  };
  const std::string secret = folder.At("alice.token"), tokens = folder.At("tokens");
  const mode_t mask = umask(0);
  CommandResult result =
      RunCommand({"token", "alice", "--roles", "infer", "--out", secret, "--append", tokens});
  umask(mask);
  ASSERT_EQ(result.code, kOk) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err, "added alice to " + tokens + "\n");
  EXPECT_EQ(mode(secret), 0600u);
  EXPECT_EQ(mode(tokens), 0600u);
  const std::string token = text(secret);
  const std::string line =
      "alice infer sha256:" + HexSha256(token.substr(0, token.size() - 1)) + "\n";
  EXPECT_EQ(text(tokens), line);

  // A file of tokens grows, and keeps its mode.
  std::ofstream(tokens, std::ios::app) << "# no line end";
  ASSERT_EQ(chmod(tokens.c_str(), 0640), 0);
  EXPECT_EQ(RunCommand({"token", "bob", "--roles", "read", "--append", tokens}).code, kOk);
  EXPECT_EQ(text(tokens).rfind(line + "# no line end\nbob read sha256:", 0), 0u);
  EXPECT_EQ(mode(tokens), 0640u);

  // No token is written over another, or without its line.
  result = RunCommand({"token", "eve", "--roles", "read", "--out", secret, "--append", tokens});
  EXPECT_EQ(result.code, kFileFailed);
  EXPECT_EQ(text(secret), token);
  EXPECT_THAT(text(tokens), Not(HasSubstr("eve")));
  const std::string other = folder.At("eve.token");
  result = RunCommand({"token", "eve", "--roles", "read", "--out", other, "--append", "/absent/t"});
  EXPECT_EQ(result.code, kFileFailed);
  EXPECT_EQ(result.err, "awqctl: cannot write /absent/t: No such file or directory\n");
  EXPECT_NE(access(other.c_str(), F_OK), 0);
}

TEST(AwqctlToken, RefusesWhatTheServerWould) {
  EXPECT_EQ(RunCommand({"token", "a"}).code, kBadArguments);
  EXPECT_EQ(RunCommand({"token", "--roles", "read"}).code, kBadArguments);
  EXPECT_THAT(RunCommand({"token", "a", "--roles", "read,root"}).err, HasSubstr("root"));
  for (const std::string& name : {std::string("a b"), std::string("a/b"), std::string(65, 'a')}) {
    const CommandResult result = RunCommand({"token", name, "--roles", "read"});
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
  const auto with = [&](const std::map<std::string, std::string>& variables) {
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    const client::Security found = security({"status"});
    for (const auto& [name, value] : variables) unsetenv(name.c_str());
    return found.tls_ca + found.tls_cert + found.tls_key + found.token_file;
  };
  EXPECT_EQ(with({{"AWQCTL_TLS_CA", "e"},
                  {"AWQCTL_TLS_CERT", "f"},
                  {"AWQCTL_TLS_KEY", "g"},
                  {"AWQCTL_TOKEN_FILE", "h"},
                  {"AWQD_TLS_CERT", "the server's"}}),
            "efgh");
  // Older names count where the new one is not set or empty.
  EXPECT_EQ(with({{"AWQD_TLS_CA", "i"},
                  {"AWQD_CLIENT_CERT", "j"},
                  {"AWQD_CLIENT_KEY", "k"},
                  {"AWQD_TOKEN_FILE", "older"},
                  {"AWQCTL_TLS_CA", ""},
                  {"AWQCTL_TOKEN_FILE", "l"}}),
            "ijkl");
}

TEST(AwqctlSecurity, AFileThatCannotWorkIsABadArgument) {
  const CommandResult result = RunCommand({"--tls_ca", "/absent", "status"});
  EXPECT_EQ(result.code, kBadArguments);
  EXPECT_THAT(result.err, HasSubstr("tls_ca: got '/absent'"));
  EXPECT_EQ(RunCommand({"--tls_ca", "/absent", "token", "a", "--roles", "read"}).code, kOk)
      << "a command that asks no server";
}

}  // namespace
}  // namespace awqd::awqctl
