// The server on Unix domain sockets: which paths it may use, which files stay behind, and who may
// connect.
#include <signal.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

class UnixSocketTest : public ::testing::Test {
 protected:
  UnixSocketTest() {
    std::filesystem::create_directory(folder_ / "models");
    SyntheticAwq::Random(256, 64, 64, 1).Write(folder_ / "models/m");
  }

  std::vector<std::string> Args(std::vector<std::string> more = {}) const {
    more.push_back("--model_repository=" + (folder_ / "models"));
    return more;
  }
  std::unique_ptr<ServerProcess> Start(std::vector<std::string> more = {}) const {
    return std::make_unique<ServerProcess>(Args(std::move(more)), "unix:" + path_);
  }
  bool Exists() const { return std::filesystem::exists(std::filesystem::symlink_status(path_)); }

  int64_t Files() const {
    return std::distance(std::filesystem::directory_iterator(folder_.path()),
                         std::filesystem::directory_iterator());
  }

  TempFolder folder_;
  const std::string path_ = folder_ / "awqd.sock";
};

// Permissions of a file; 0 without it.
int ModeOf(const std::string& path) {
  struct stat found = {};
  return lstat(path.c_str(), &found) == 0 ? static_cast<int>(found.st_mode & 0777) : 0;
}

TEST_F(UnixSocketTest, ServesOnASocketAndTakesItAway) {
  const auto server = Start();
  ASSERT_TRUE(server->WaitServing()) << server->log();
  EXPECT_THAT(server->log(), HasSubstr("listening on unix:" + path_));
  EXPECT_EQ(ModeOf(path_), 0660);
  const auto y = server->NewClient()->QuantizedMatmul(OneToken());
  ASSERT_TRUE(y.ok()) << y.status();
  EXPECT_THAT(y->output.shape, ::testing::ElementsAre(1, 64));
  for (const std::vector<std::string>& command : std::vector<std::vector<std::string>>{
           {"status"}, {"healthcheck"}, {"matmul", "m", "layer", "--random", "2"}}) {
    for (const std::string& address : {"unix:" + path_, "unix://" + path_}) {
      std::vector<std::string> args = {"--address", address};
      args.insert(args.end(), command.begin(), command.end());
      const ExitReport report = RunProgram(BinaryPath("awqctl"), args);
      EXPECT_EQ(report.code, 0) << address << " " << command[0] << ": " << report.log;
    }
  }
  const ExitReport report = server->Stop();
  EXPECT_EQ(report.code, 0) << report.log;
  EXPECT_FALSE(Exists());
}

TEST_F(UnixSocketTest, ServesOnSeveralAddresses) {
  const std::string other = folder_ / "other.sock";
  ServerProcess server(
      Args({"--address=unix:" + path_ + ",unix://" + other, "--unix_socket_mode=0600"}));
  ASSERT_TRUE(server.WaitServing()) << server.log();
  EXPECT_THAT(server.address(), HasSubstr("127.0.0.1:"));
  const std::string expected = server.NewClient()->QuantizedMatmul(OneToken())->output.bytes;
  for (const std::string& path : {path_, other}) {
    EXPECT_EQ(ModeOf(path), 0600);
    const auto client = *client::Client::Create({.address = "unix:" + path});
    const auto y = client->QuantizedMatmul(OneToken());
    ASSERT_TRUE(y.ok()) << y.status();
    EXPECT_EQ(y->output.bytes, expected);
  }
  EXPECT_EQ(server.Stop().code, 0);
  EXPECT_FALSE(Exists());
  EXPECT_EQ(ModeOf(other), 0);
}

TEST_F(UnixSocketTest, ReplacesTheSocketOfAServerThatWasKilled) {
  const auto first = Start();
  ASSERT_TRUE(first->WaitServing()) << first->log();
  const auto old_client = first->NewClient();
  EXPECT_TRUE(old_client->QuantizedMatmul(OneToken()).ok());
  first->Signal(SIGKILL);
  EXPECT_EQ(first->Wait().code, 128 + SIGKILL);
  EXPECT_TRUE(Exists());
  const auto second = Start();
  ASSERT_TRUE(second->WaitServing()) << second->log();
  EXPECT_TRUE(second->NewClient()->QuantizedMatmul(OneToken()).ok());
  EXPECT_EQ(second->Stop().code, 0);
  EXPECT_FALSE(Exists());
}

// Expects a server that did not start, with one line that has the reason.
void ExpectRefusal(const ExitReport& report, int code, const std::string& why) {
  EXPECT_EQ(report.code, code) << report.log;
  EXPECT_THAT(report.log, HasSubstr(why));
  EXPECT_LT(report.took, absl::Seconds(5));
}

TEST_F(UnixSocketTest, LeavesALiveServerAlone) {
  const auto first = Start();
  ASSERT_TRUE(first->WaitServing()) << first->log();
  ExpectRefusal(Start()->Wait(), 1, "another server listens there");
  EXPECT_TRUE(first->NewClient()->QuantizedMatmul(OneToken()).ok());
  EXPECT_EQ(first->Stop().code, 0);
  EXPECT_FALSE(Exists());
}

TEST_F(UnixSocketTest, LeavesFilesAlone) {
  std::ofstream(path_) << "precious";
  ExpectRefusal(Start()->Wait(), 1, "not a socket");
  std::string text;
  std::ifstream(path_) >> text;
  EXPECT_EQ(text, "precious");
  std::filesystem::remove(path_);
  std::filesystem::create_directory(path_);
  ExpectRefusal(Start()->Wait(), 1, "not a socket");
  EXPECT_TRUE(std::filesystem::is_directory(path_));
  std::filesystem::remove(path_);
  std::filesystem::create_symlink(folder_ / "elsewhere", path_);
  ExpectRefusal(Start()->Wait(), 1, "not a socket");
  EXPECT_TRUE(std::filesystem::is_symlink(path_));
}

TEST_F(UnixSocketTest, TakesAwayOnlyItsOwn) {
  const auto server = Start();
  ASSERT_TRUE(server->WaitServing()) << server->log();
  std::filesystem::remove(path_);
  std::ofstream(path_) << "precious";
  EXPECT_EQ(server->Stop().code, 0);
  EXPECT_TRUE(std::filesystem::is_regular_file(path_));
}

// gRPC, which removes sockets by their path, must not remove them either.
TEST_F(UnixSocketTest, TakesAwayNoOtherServersSocket) {
  const auto first = Start();
  ASSERT_TRUE(first->WaitServing()) << first->log();
  std::filesystem::remove(path_);
  const auto second = Start();
  ASSERT_TRUE(second->WaitServing()) << second->log();
  EXPECT_EQ(first->Stop().code, 0);
  ASSERT_TRUE(Exists());
  EXPECT_EQ(ModeOf(path_), 0660);
  EXPECT_TRUE(second->NewClient()->QuantizedMatmul(OneToken()).ok());
  EXPECT_EQ(second->Stop().code, 0);
  EXPECT_FALSE(Exists());
  EXPECT_EQ(Files(), 1) << "the models";
}

TEST_F(UnixSocketTest, RefusesPathsThatCannotBe) {
  const auto refusal = [this](const std::string& address) {
    return ServerProcess(Args(), address).Wait();
  };
  ExpectRefusal(refusal("unix:" + std::string(108, 'x')), 2, "108 bytes");
  ExpectRefusal(refusal("unix:"), 2, "--address");
  ExpectRefusal(refusal("unix://host/path"), 2, "--address");
  ExpectRefusal(refusal("unix:/tmp/"), 2, "--address");
  ExpectRefusal(refusal("unix:/nonexistent/a.sock"), 1, "/nonexistent");
  ExpectRefusal(refusal("unix:" + path_ + ",unix:" + path_), 1, "twice");
  EXPECT_FALSE(Exists());
  // If a later address fails, the earlier sockets are removed again.
  ExpectRefusal(refusal("unix:" + path_ + ",192.0.2.1:8001"), 1, "192.0.2.1");
  EXPECT_FALSE(Exists());
  const std::string longest =
      folder_.path() + "/" + std::string(107 - folder_.path().size() - 1, 'x');
  ServerProcess server(Args(), "unix:" + longest);
  ASSERT_TRUE(server.WaitServing()) << server.log();
  EXPECT_EQ(server.Stop().code, 0);
  EXPECT_EQ(Files(), 1) << "the models";
}

TEST_F(UnixSocketTest, OneOfManyWinsADeadSocket) {
  const auto dead = Start();
  ASSERT_TRUE(dead->WaitListening()) << dead->log();
  dead->Signal(SIGKILL);
  dead->Wait();
  std::vector<std::unique_ptr<ServerProcess>> servers;
  for (int i = 0; i < 6; ++i) servers.push_back(Start());
  int won = 0;
  for (const auto& server : servers) won += server->WaitListening() ? 1 : 0;
  EXPECT_EQ(won, 1);
  for (const auto& server : servers) {
    server->Signal(SIGTERM);
    const ExitReport report = server->Wait();
    EXPECT_TRUE(report.code == 0 || absl::StrContains(report.log, "another server")) << report.log;
  }
  EXPECT_FALSE(Exists());
}

}  // namespace
}  // namespace awqd
