// Unusual time: a process that stands still, a time of day that jumps by days, a thread without a
// processor for a second. Answers stay right, and deadlines and the shutdown keep their length.
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/sweeps/failing_server.h"

namespace awqd::sweeps {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kDay = int64_t{24} * 3600 * 1'000'000'000;

class TimeSweepTest : public ::testing::Test {
 protected:
  bool Serves() {
    const auto serving = server_.client().IsServing("");
    return serving.ok() && *serving;
  }
  // Calls of every kind. Calls with their own deadline have 3 s, which no jump may use up.
  void ExpectAllIsWell() {
    EXPECT_EQ(server_.Product("m"), absl::OkStatus());
    EXPECT_EQ(server_.Product("other"), absl::OkStatus());
    EXPECT_EQ(server_.process().NewClient(absl::Seconds(5))->GetServerInfo().status(),
              absl::OkStatus())
        << "by a new connection";
    EXPECT_TRUE(Serves());
    EXPECT_EQ(server_.client().LoadModel("m").status(), absl::OkStatus());
    EXPECT_EQ(server_.Product("m"), absl::OkStatus());
  }
  std::vector<int> Threads() {
    std::vector<int> out;
    for (const auto& entry : std::filesystem::directory_iterator(
             absl::StrCat("/proc/", server_.process().pid(), "/task"))) {
      out.push_back(std::atoi(entry.path().filename().c_str()));
    }
    return out;
  }

  FailingServer server_;
};

TEST_F(TimeSweepTest, AProcessThatStoodStillGoesOn) {
  std::thread call([&] {
    absl::SleepFor(absl::Milliseconds(200));  // sent while the process stands still
    EXPECT_EQ(server_.process().NewClient(absl::Seconds(20))->GetServerInfo().status(),
              absl::OkStatus());
  });
  server_.process().Signal(SIGSTOP);
  absl::SleepFor(absl::Milliseconds(1500));
  server_.process().Signal(SIGCONT);
  call.join();
  ExpectAllIsWell();
  EXPECT_EQ(server_.process().Stop().code, 0);
}

TEST_F(TimeSweepTest, TheTimeOfDayMayJump) {
  for (const int64_t days : {3, -3, 400, -400, 0}) {
    SCOPED_TRACE(absl::StrCat("to ", days, " days from now"));
    server_.control().clock_shift_ns = days * kDay;
    ExpectAllIsWell();
    absl::SleepFor(absl::Milliseconds(300));  // for threads that check the time by themselves
    ASSERT_TRUE(server_.alive()) << server_.process().log();
    ExpectAllIsWell();
    const absl::Time shown = absl::Now() + absl::Hours(24 * days);
    EXPECT_THAT(server_.process().log(),
                HasSubstr(absl::FormatTime("%Y-%m-%dT%H:", shown, absl::UTCTimeZone())))
        << "the server saw the jump";
  }
  EXPECT_EQ(server_.process().Stop().code, 0);
}

// Work that began before a jump back must not last for days.
TEST_F(TimeSweepTest, TheEndKeepsItsLengthOverAJumpBack) {
  server_.control().clock_shift_ns = 3 * kDay;
  ExpectAllIsWell();
  absl::SleepFor(absl::Milliseconds(100));
  server_.control().clock_shift_ns = 0;
  const ExitReport report = server_.process().Stop();
  EXPECT_EQ(report.code, 0) << report.log;
  EXPECT_LT(report.took, absl::Seconds(15));
}

// Each busy thread in turn gets no processor for a second.
TEST_F(TimeSweepTest, EachThreadMayStarve) {
  server_.control().stall_ns = 1'000'000'000;
  int64_t stalled = 0;
  for (const int thread : Threads()) {
    SCOPED_TRACE(absl::StrCat("thread ", thread));
    const int64_t before = server_.control().stalls;
    server_.control().stalled_thread = thread;
    EXPECT_EQ(server_.Product("m"), absl::OkStatus());
    EXPECT_EQ(server_.client().LoadModel("other").status(), absl::OkStatus());
    EXPECT_EQ(server_.Product("other"), absl::OkStatus());
    EXPECT_TRUE(Serves());
    server_.control().stalled_thread = 0;
    stalled += server_.control().stalls - before;
  }
  EXPECT_GE(stalled, 1) << "the loop, and what else looked at the time or waited meanwhile";
  ExpectAllIsWell();
  EXPECT_EQ(server_.process().Stop().code, 0);
}

}  // namespace
}  // namespace awqd::sweeps
