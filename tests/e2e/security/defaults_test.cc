// A server without security options and its warnings; and the steps from awqctl token to a call.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "tests/e2e/security/security_fixture.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class DefaultsTest : public SecurityTest {
 protected:
  absl::Status Load(const ServerProcess& server) const {
    return server.NewClient()->LoadModel("absent").status();
  }
};

TEST_F(DefaultsTest, OnThisMachineAllIsOpenAndQuiet) {
  const auto server = Start(Args({}), false);
  EXPECT_TRUE(absl::IsNotFound(Load(*server))) << Load(*server);
  EXPECT_THAT(server->log(), Not(HasSubstr("beyond this machine")));
}

TEST_F(DefaultsTest, BeyondItModelsAreFixedAndTheLogWarns) {
  const auto server = Start(Args({}), false, "0.0.0.0:0");
  const absl::Status status = Load(*server);
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("awqd.v1.ModelRepository/LoadModel: switched off (--model_control=none)"));
  EXPECT_TRUE(server->NewClient()->ListModels().ok());
  EXPECT_THAT(server->log(), HasSubstr("listening beyond this machine without encryption "
                                       "(--tls_cert) and authentication"));
}

TEST_F(DefaultsTest, ModelControlCanBeGivenToAll) {
  const auto server = Start(Args({"--model_control=any"}), false, "0.0.0.0:0");
  EXPECT_TRUE(absl::IsNotFound(Load(*server)));
}

TEST_F(DefaultsTest, TokensDoNotTravelInTheClear) {
  WriteFile(tokens_path_, TokenLine("ian", "infer", "t"));
  const std::string repository = "--model_repository=" + (folder_ / "models");
  const ExitReport report = RunProgram(
      BinaryPath("awqd"), {repository, "--address=0.0.0.0:0", "--tokens=" + tokens_path_});
  EXPECT_EQ(report.code, 2);
  EXPECT_THAT(report.log, HasSubstr("--insecure_tokens"));
  const auto server =
      Start(Args({"--tokens=" + tokens_path_, "--insecure_tokens"}), false, "0.0.0.0:0");
  EXPECT_THAT(server->log(), HasSubstr("without encryption (--tls_cert)"));
  EXPECT_THAT(server->log(), Not(HasSubstr("authentication")));
}

TEST_F(DefaultsTest, FromAwqctlTokenToACall) {
  const ExitReport made =
      RunProgram(BinaryPath("awqctl"), {"token", "ada", "--roles", "read,admin", "--json"});
  ASSERT_EQ(made.code, 0) << made.log;
  const std::vector<std::string> parts = absl::StrSplit(made.log, '"');
  ASSERT_EQ(parts.size(), 9u) << made.log;
  const std::string &token = parts[3], &line = parts[7];
  EXPECT_EQ(token.size(), 5 + 64u) << "256 bits";
  WriteFile(tokens_path_, line + "\n");
  WriteFile(folder_ / "token", token + "\n");
  const auto server = Start(TlsArgs({"--tokens=" + tokens_path_, "--log_level=debug"}), true);
  const auto awqctl = [&](std::vector<std::string> args) {
    args.insert(args.begin(), {"--address", server->address(), "--tls_ca", ca_path_});
    return RunProgram(BinaryPath("awqctl"), args);
  };
  const ExitReport good = awqctl({"--token_file", folder_ / "token", "status"});
  EXPECT_EQ(good.code, 0) << good.log;
  const ExitReport without = awqctl({"status"});
  EXPECT_EQ(without.code, 3) << without.log;
  EXPECT_THAT(without.log,
              HasSubstr("UNAUTHENTICATED: awqd.v1.ServerInfo/GetServerInfo: got none"));
  const ExitReport denied =
      awqctl({"--token_file", folder_ / "token", "bench", "--weight", "m/w", "--requests", "1"});
  EXPECT_EQ(denied.code, 3) << denied.log;
  const ExitReport healthy = awqctl({"healthcheck"});
  EXPECT_EQ(healthy.code, 0) << healthy.log;
  server->Stop();
  EXPECT_THAT(server->log(), Not(HasSubstr(token)));
  EXPECT_THAT(server->log(), HasSubstr("identity=ada")) << "the access log";
}

}  // namespace
}  // namespace awqd
