// The status line of a terminal, beneath the log.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/obs/logging.h"
#include "tests/testing/pseudo_terminal.h"

namespace awqd::obs {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kErase[] = "\r\x1b[K";

class TerminalTest : public ::testing::Test {
 protected:
  TerminalTest() : stderr_(dup(STDERR_FILENO)) {
    setenv("TERM", "xterm", 1);
    EXPECT_EQ(dup2(terminal_.slave(), STDERR_FILENO), STDERR_FILENO);
    SetUpLogging(LogLevel::kInfo, LogFormat::kText);
  }
  ~TerminalTest() override {
    FlushLog(absl::Seconds(20));
    dup2(stderr_, STDERR_FILENO);
    close(stderr_);
    SetUpLogging(LogLevel::kInfo, LogFormat::kText);
  }

  std::string Read() const {
    EXPECT_TRUE(FlushLog(absl::Seconds(20)));
    return terminal_.Read();
  }

  const awqd::testing::PseudoTerminal terminal_{40};
  const int stderr_;
};

TEST_F(TerminalTest, TheLastLineStaysBeneathTheLog) {
  ASSERT_TRUE(ShowsStatusLine());
  LogEvent(LogLevel::kInfo, "first", {});
  EXPECT_THAT(Read(), EndsWith(" first\r\n")) << "no line to erase yet";
  ShowStatusLine("10 %");
  EXPECT_EQ(Read(), std::string(kErase) + "10 %");
  LogEvent(LogLevel::kInfo, "second", {});
  const std::string log = Read();
  EXPECT_THAT(log, StartsWith(kErase));
  EXPECT_THAT(log, EndsWith(std::string(" second\r\n") + "10 %"));
  ShowStatusLine("20 %");
  EXPECT_EQ(Read(), std::string(kErase) + "20 %");
  ShowStatusLine("");
  EXPECT_EQ(Read(), kErase);
  ShowStatusLine("");
  EXPECT_EQ(Read(), "") << "there was none";
  LogEvent(LogLevel::kInfo, "third", {});
  EXPECT_THAT(Read(), EndsWith(" third\r\n"));
}

TEST_F(TerminalTest, ItIsOneLineOfTheTerminal) {
  ShowStatusLine(absl::StrCat(std::string(100, 'x'), "\n"));
  EXPECT_EQ(Read(), kErase + std::string(39, 'x'));
  ShowStatusLine("a\x1b[31m\nb");
  EXPECT_EQ(Read(), std::string(kErase) + "a\\x1b[31m\\nb");
}

TEST_F(TerminalTest, OnlyForTextOnATerminalThatCanErase) {
  SetUpLogging(LogLevel::kInfo, LogFormat::kJson);
  EXPECT_FALSE(ShowsStatusLine());
  ShowStatusLine("10 %");
  EXPECT_EQ(Read(), "");
  setenv("TERM", "dumb", 1);
  SetUpLogging(LogLevel::kInfo, LogFormat::kText);
  EXPECT_FALSE(ShowsStatusLine());
  setenv("TERM", "xterm", 1);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  dup2(ends[1], STDERR_FILENO);
  SetUpLogging(LogLevel::kInfo, LogFormat::kText);
  EXPECT_FALSE(ShowsStatusLine());
  close(ends[0]);
  close(ends[1]);
}

}  // namespace
}  // namespace awqd::obs
