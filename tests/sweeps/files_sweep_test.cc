// Every call on files during a load fails once, in every possible way. The load then ends with a
// status that names no path, the previous version stays served, and the next load succeeds.
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/sweeps/failing_server.h"

namespace awqd::sweeps {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct Way {
  const char* name;
  int error;
  Twist twist;
  bool harmless;  // the failure of this call may have no effect
};

class FilesSweepTest : public ::testing::TestWithParam<Way> {
 protected:
  absl::Status Load() { return server_.client().LoadModel("m").status(); }

  // Checks the server after a load in which the `number`-th call failed.
  void Expect(const absl::Status& load, int64_t number) {
    SCOPED_TRACE(
        absl::StrCat("call ", number, ", ", server_.control().where, " ", load.ToString()));
    ASSERT_TRUE(server_.alive()) << server_.process().log();
    if (GetParam().harmless && CanBeInterrupted()) {
      EXPECT_TRUE(load.ok());
    }
    failed_ += load.ok() ? 0 : 1;
    EXPECT_THAT(load.message(), Not(HasSubstr(server_.repository()))) << "a path of the server's";
    EXPECT_NE(load.code(), absl::StatusCode::kUnknown);
    EXPECT_THAT(load.message(), Not(HasSubstr("while it was loaded"))) << "nobody touched a file";
    EXPECT_THAT(load.message(), Not(HasSubstr("were added or removed"))) << "nobody touched a file";
    EXPECT_NE(load.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(server_.Product("m"), absl::OkStatus()) << "the version from before";
    EXPECT_EQ(server_.Product("other"), absl::OkStatus());
    EXPECT_EQ(Load(), absl::OkStatus()) << "the next load";
    EXPECT_EQ(server_.Product("m"), absl::OkStatus());
  }

  // Only these calls of a load can be interrupted by a signal, or read less.
  bool CanBeInterrupted() {
    const std::string where = server_.control().where;
    return where == "open" || where == "openat" || where == "openat2" || where == "pread";
  }

  FailingServer server_;
  int failed_ = 0;  // loads
};

TEST_P(FilesSweepTest, ALoadSurvivesEachCallThatFails) {
  server_.control().error = GetParam().error;
  server_.control().twist = GetParam().twist;
  ASSERT_EQ(Load(), absl::OkStatus());
  const int files = server_.process().open_files();
  absl::Status load;
  const auto body = [&] { load = Load(); };
  const int64_t calls = server_.Count(kFiles, body);
  ASSERT_GT(calls, 5) << "the shim counts";
  int64_t failed = 0;
  for (int64_t number = 1; number <= calls && !HasFatalFailure(); ++number) {
    if (!server_.FailAt(kFiles, number, body)) continue;
    ++failed;
    Expect(load, number);
  }
  EXPECT_GT(failed, 5) << "of " << calls << " calls";
  if (!GetParam().harmless) {
    EXPECT_GT(failed_, 5) << "loads that failed, of " << failed;
  }
  EXPECT_LE(server_.process().OpenFilesAgain(files), files);
  const ExitReport report = server_.process().Stop();
  EXPECT_EQ(report.code, 0) << report.log;
}

INSTANTIATE_TEST_SUITE_P(Ways, FilesSweepTest,
                         ::testing::Values(Way{"IoError", EIO, kErrno, false},
                                           Way{"NoMemory", ENOMEM, kErrno, false},
                                           Way{"Interrupted", EINTR, kErrno, true},
                                           Way{"NoDescriptors", EMFILE, kErrno, false},
                                           Way{"ShortRead", 0, kShortRead, true},
                                           Way{"EndOfFile", 0, kEndOfFile, false}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace awqd::sweeps
