// The N-th allocation of the server fails, wherever it is: during a load, the three kinds of calls,
// an unload. Either the call ends with a status, nothing stays behind, and the next one is right;
// or, if that is impossible halfway, the process ends with a line that has the reason. It never
// continues in a broken state. Cases in which gRPC or another library ends the process are listed,
// because they check no allocation.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/synthetic_awq.h"
#include "tests/sweeps/failing_server.h"

namespace awqd::sweeps {
namespace {

// About this many of each operation's allocations, or all with AWQD_TEST_FULL=1: of awqd's own, and
// of all, most of which end the process.
constexpr int64_t kOwn = 40, kAll = 4;

class MemorySweepTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("AWQD_TEST_LONG") == nullptr) {
      GTEST_SKIP() << "it takes minutes (tests/run.sh --long)";
    }
  }

  using Body = std::function<absl::Status()>;

  // Fails the allocations that `body` causes in the server, one after the other. `repair` loads
  // both models again.
  void Sweep(
      const Body& body, const std::function<void()>& repair = [] {}) {
    SweepKind(kOwnMemory, kOwn, body, repair);
    SweepKind(kMemory, kAll, body, repair);
    for (const auto& [what, times] : died_) {
      std::printf("  %3d times %s\n", times, what.c_str());
    }
    ExpectNothingStays();
  }

  void SweepKind(Kind kind, int64_t about, const Body& body, const std::function<void()>& repair) {
    absl::Status status;
    const auto run = [&] { status = body(); };
    run();
    ASSERT_EQ(status, absl::OkStatus());
    const int64_t count = server_.Count(kind, run);
    ASSERT_GT(count, 3) << "the shim counts";
    const int64_t step =
        std::getenv("AWQD_TEST_FULL") != nullptr ? 1 : std::max<int64_t>(1, count / about);
    int failed = 0, refused = 0;
    for (int64_t number = 1; number <= count && !HasFatalFailure(); number += step) {
      if (!server_.FailAt(kind, number, run) && server_.alive()) continue;
      ++failed;
      refused += status.ok() ? 0 : 1;
      repair();
      const std::string which = absl::StrCat("allocation ", number, " of ", count);
      Expect(status, which);
      run();
      EXPECT_EQ(status, absl::OkStatus()) << "the next one after " << which;
    }
    std::printf("%s: %d of %d allocations failed, %d calls with them\n",
                kind == kOwnMemory ? "awqd's own" : "anybody's", failed, static_cast<int>(count),
                refused);
    EXPECT_GT(failed, 2);
  }

  // Checks the server after a call in which an allocation failed. The process may have ended, but
  // after an allocation of awqd itself never without a message.
  void Expect(const absl::Status& status, const std::string& number) {
    const std::string asked_by = server_.control().asked_by;
    SCOPED_TRACE(absl::StrCat(number, ": ", server_.control().where, " for",
                              server_.control().callers, "; ", status.ToString()));
    const absl::Status well = server_.IsWell();
    const bool lost = absl::IsDeadlineExceeded(status);
    if (server_.alive() && well.ok() && !lost) return;
    // Classes that Protocol Buffers generates are compiled into awqd, and do not survive it.
    const bool parsing = absl::StrContains(server_.control().callers, "libprotobuf");
    const std::string whose = parsing ? "libprotobuf" : asked_by;
    if (server_.alive()) {
      // gRPC's locks stay locked when it throws, and its calls never end.
      EXPECT_NE(whose, "awqd") << well << (lost ? "; the call got lost" : "");
      ++died_[absl::StrCat(whose, ": the server went on, and was not well")];
    } else {
      const ExitReport report = server_.process().Wait();
      const bool said = absl::StrContains(report.log, "awqd: ended where nothing can be undone");
      ++died_[absl::StrCat(whose, ": it ended ",
                           said ? "with a line that says why" : "without a word")];
      EXPECT_TRUE(said || whose != "awqd") << "it ended with code " << report.code;
    }
    server_.Restart();
  }

  void ExpectNothingStays() {
    ASSERT_EQ(server_.client().LoadModel("m").status(), absl::OkStatus());
    for (const absl::Time end = absl::Now() + absl::Seconds(10); absl::Now() < end;) {
      const auto info = server_.client().GetServerInfo();
      ASSERT_TRUE(info.ok()) << info.status();
      if (info->devices(0).weights_bytes() == weights_) return;
      absl::SleepFor(absl::Milliseconds(20));
    }
    ADD_FAILURE() << "got other weights_bytes than at the start, which were " << weights_;
  }

  FailingServer server_;
  const int64_t weights_ = server_.client().GetServerInfo()->devices(0).weights_bytes();
  std::map<std::string, int> died_;  // by owner of the allocation, and how
};

TEST_F(MemorySweepTest, AProduct) {
  Sweep([&] { return server_.client().QuantizedMatmul(OneToken()).status(); });
}

TEST_F(MemorySweepTest, AStream) {
  Sweep([&]() -> absl::Status {
    const auto stream = server_.client().QuantizedMatmulStream({.timeout = absl::Seconds(10)});
    for (int i = 0; i < 3; ++i) {
      if (absl::Status sent = stream->Send(OneToken()); !sent.ok()) break;
    }
    (void)stream->CloseSend();
    absl::Status first;
    for (;;) {
      auto answer = stream->Receive();
      if (!answer.ok()) return answer.status();
      if (!answer->has_value()) return first;
      if (first.ok()) first = (*answer)->result.status();
    }
  });
}

TEST_F(MemorySweepTest, AWeightInTheRequest) {
  const auto weight = SyntheticAwq::Random(256, 64, 64, 9).ToPacked();
  Sweep([&] {
    client::MatmulCall call = OneToken();
    call.weight = weight;
    return server_.client().QuantizedMatmul(call).status();
  });
}

TEST_F(MemorySweepTest, ALoad) {
  Sweep([&] { return server_.client().LoadModel("m").status(); });
}

TEST_F(MemorySweepTest, AnUnload) {
  Sweep(
      [&]() -> absl::Status {
        if (absl::Status unloaded = server_.client().UnloadModel("other"); !unloaded.ok()) {
          return unloaded;
        }
        return server_.client().LoadModel("other").status();
      },
      [&] { (void)server_.client().LoadModel("other"); });
}

}  // namespace
}  // namespace awqd::sweeps
