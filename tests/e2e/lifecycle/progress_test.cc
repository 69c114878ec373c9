// The real server's reports of loads: a bar on a terminal, lines in a log, shares through
// ListModels.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/lifecycle/lifecycle_fixture.h"
#include "tests/testing/pseudo_terminal.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The output of the server on a terminal until it is ready and is stopped.
std::string OnATerminal(std::vector<std::string> args) {
  const testing::PseudoTerminal terminal(120);
  std::vector<char*> argv;
  std::string program = BinaryPath("awqd");
  argv.push_back(program.data());
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    setenv("TERM", "xterm", 1);
    dup2(terminal.slave(), STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  std::string shown;
  const absl::Time end = absl::Now() + absl::Seconds(30);
  while (!absl::StrContains(shown, " ready ") && absl::Now() < end) {
    absl::SleepFor(absl::Milliseconds(5));
    shown += terminal.Read();
  }
  kill(pid, SIGTERM);
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << shown;
  return shown;
}

TEST_F(LifecycleTest, ATerminalShowsABarThatGoesAway) {
  const std::string shown = OnATerminal(Args({"--device=cpu", "--address=127.0.0.1:0"}));
  const size_t bar = shown.find("\r\x1b[K[..............................]   0 %  0 of 0 MiB");
  ASSERT_NE(bar, std::string::npos) << shown;
  const size_t ready = shown.find(" ready models=1");
  ASSERT_NE(ready, std::string::npos) << shown;
  // The status line was erased last, before the log went on.
  const size_t last = shown.rfind("\r\x1b[K", ready);
  EXPECT_GT(last, bar);
  EXPECT_EQ(shown.find("0 MiB", last), std::string::npos) << shown.substr(last);
}

TEST_F(LifecycleTest, ALogShowsNoBar) {
  Start();
  const ExitReport report = Stop();
  EXPECT_THAT(report.log, Not(HasSubstr("\x1b")));
  EXPECT_THAT(report.log, Not(HasSubstr("[....")));
  EXPECT_THAT(report.log, HasSubstr("loaded model=m"));
}

TEST_F(LifecycleTest, ListModelsSaysTheShareThatIsLoaded) {
  WriteBigModels();
  ServerProcess server(Args());
  ASSERT_TRUE(server.WaitListening()) << server.log();
  const auto client = server.NewClient();
  bool loading = false, ready = false;
  while (!ready) {
    absl::SleepFor(absl::Milliseconds(1));  // leaves a CPU to the loading threads
    const auto models = client->ListModels();
    ASSERT_TRUE(models.ok()) << models.status();
    ready = true;
    for (const v1::ModelSummary& model : models->models()) {
      loading |= model.state() == v1::LOADING;
      ready &= model.state() == v1::READY;
      EXPECT_GE(model.loaded_share(), 0.0f);
      EXPECT_LE(model.loaded_share(), 1.0f);
      if (model.state() != v1::LOADING) {
        EXPECT_EQ(model.loaded_share(), model.state() == v1::READY ? 1.0f : 0.0f);
      }
    }
  }
  EXPECT_TRUE(loading) << "all were loaded before the first answer";
  EXPECT_EQ(server.Stop().code, 0);
}

}  // namespace
}  // namespace awqd
