// Files that change while a server runs.
#include "server/security/watched_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/obs/logging.h"

namespace awqd::security {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kSoon = std::chrono::milliseconds(5);

class WatchedFilesTest : public ::testing::Test {
 protected:
  WatchedFilesTest() { std::filesystem::create_directories(folder_); }
  ~WatchedFilesTest() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& text) const {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path + ".new") << text;
    std::filesystem::rename(path + ".new", path);
    return path;
  }
  absl::Status Start(std::vector<std::string> paths) {
    auto started = WatchedFiles::Start(
        std::move(paths),
        [this](const WatchedFiles::Contents& contents) -> absl::Status {
          MutexLock lock(&mu_);
          if (contents[0] == "bad") {
            ++refused_;
            return absl::InvalidArgumentError("it is bad");
          }
          contents_ = contents;
          ++applied_;
          return absl::OkStatus();
        },
        kSoon);
    if (started.ok()) watched_ = *std::move(started);
    return started.status();
  }
  template <typename Condition>
  bool Eventually(Condition condition) {
    for (const absl::Time until = absl::Now() + absl::Seconds(10); absl::Now() < until;) {
      {
        MutexLock lock(&mu_);
        if (condition()) return true;
      }
      absl::SleepFor(absl::Milliseconds(2));
    }
    return false;
  }
  bool Becomes(const WatchedFiles::Contents& expected) {
    return Eventually([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return contents_ == expected; });
  }

  const std::string folder_ = testing::TempDir() + "/awqd_watched_" + std::to_string(getpid());
  Mutex mu_;
  WatchedFiles::Contents contents_ ABSL_GUARDED_BY(mu_);
  int applied_ ABSL_GUARDED_BY(mu_) = 0;
  int refused_ ABSL_GUARDED_BY(mu_) = 0;
  std::unique_ptr<WatchedFiles> watched_;
};

TEST_F(WatchedFilesTest, StartsWithWhatIsThere) {
  ASSERT_TRUE(Start({Write("a", "1"), Write("b", "2")}).ok());
  MutexLock lock(&mu_);
  EXPECT_THAT(contents_, ElementsAre("1", "2"));
}

TEST_F(WatchedFilesTest, TakesOverWhatChanges) {
  ASSERT_TRUE(Start({Write("a", "1"), Write("b", "2")}).ok());
  Write("b", "3");
  EXPECT_TRUE(Becomes({"1", "3"}));
  Write("a", "4");
  EXPECT_TRUE(Becomes({"4", "3"}));
}

TEST_F(WatchedFilesTest, FollowsLinksThatAreTurned) {
  Write("one", "1");
  Write("two", "2");
  const std::string link = folder_ + "/link";
  std::filesystem::create_symlink("one", link);
  ASSERT_TRUE(Start({link}).ok());
  std::filesystem::create_symlink("two", link + ".new");
  std::filesystem::rename(link + ".new", link);
  EXPECT_TRUE(Becomes({"2"}));
}

TEST_F(WatchedFilesTest, WhatIsBadOrGoneChangesNothing) {
  const std::string path = Write("a", "1");
  ASSERT_TRUE(Start({path}).ok());
  Write("a", "bad");
  EXPECT_TRUE(Eventually([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return refused_ == 1; }));
  EXPECT_TRUE(Becomes({"1"}));
  std::filesystem::remove(path);
  Write("a", "2");
  EXPECT_TRUE(Becomes({"2"}));
  MutexLock lock(&mu_);
  EXPECT_EQ(applied_, 2);
  EXPECT_EQ(refused_, 1) << "once, however often it was looked at";
}

TEST_F(WatchedFilesTest, ARequestedReloadAppliesWhatIsThereAndLogsIt) {
  EXPECT_EQ(WatchedFiles::RequestReload(), 0);
  ASSERT_TRUE(Start({Write("a", "1"), Write("b", "2")}).ok());
  const auto applied = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return applied_ == 2; };
  EXPECT_FALSE(applied());
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(WatchedFiles::RequestReload(), 2);
  EXPECT_TRUE(Eventually(applied)) << "unchanged as they are";
  Write("a", "bad");
  EXPECT_TRUE(Eventually([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return refused_ == 1; }));
  WatchedFiles::RequestReload();
  EXPECT_TRUE(Eventually([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return refused_ == 2; }));
  watched_.reset();
  obs::FlushLog(absl::Seconds(20));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("reloaded files on SIGHUP files="),
                    HasSubstr("kept the previous contents of files that SIGHUP asked to reload")));
  EXPECT_EQ(WatchedFiles::RequestReload(), 0);
}

TEST_F(WatchedFilesTest, DoesNotStartOnWhatCannotBeRead) {
  const auto refusal = [this](const std::string& path) {
    const absl::Status status = Start({path});
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    return std::string(status.message());
  };
  EXPECT_THAT(refusal(folder_ + "/absent"), HasSubstr("No such file"));
  EXPECT_THAT(refusal(folder_), HasSubstr("not a regular file"));
  const std::string fifo = folder_ + "/fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_THAT(refusal(fifo), HasSubstr("not a regular file"));
  EXPECT_THAT(refusal(Write("large", std::string((1 << 20) + 1, 'x'))), HasSubstr("1 MiB"));
  EXPECT_EQ(Start({Write("a", "bad")}).message(), "it is bad");
}

}  // namespace
}  // namespace awqd::security
