// LifecycleTest: a repository with the small model "m", and calls of its product.
#pragma once

#include <atomic>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"

namespace awqd {

class LifecycleTest : public ServerTest {
 protected:
  LifecycleTest() { SyntheticAwq::Random(256, 64, 64, 1).Write(repository_ / "m"); }

  // They are loaded before "m". One such load may be over before the test goes on; twelve are not.
  void WriteBigModels() const {
#ifdef AWQD_THREAD_SANITIZER
    constexpr int64_t kN = 1024;  // a load takes as long as one of 8192 columns otherwise
#else
    constexpr int64_t kN = 8192;
#endif
    SyntheticAwq::Random(8192, kN, 128, 2).Write(repository_ / "big0");
    for (int i = 1; i < 12; ++i) {
      std::filesystem::copy(repository_ / "big0", repository_ / absl::StrCat("big", i),
                            std::filesystem::copy_options::recursive |
                                std::filesystem::copy_options::create_hard_links);
    }
  }

  // Calls in flight, each on a thread of its own.
  class Calls {
   public:
    Calls(client::Client& client, int count) {
      for (int i = 0; i < count; ++i) {
        threads_.emplace_back([this, &client, i] {
          statuses_[i] = client.QuantizedMatmul(OneToken()).status();
          ++ended_;
        });
      }
    }
    // There is one call more than the server's queue holds: when it is refused, the others are
    // queued.
    void AwaitFirst() const {
      while (ended_ == 0) absl::SleepFor(absl::Milliseconds(1));
    }
    std::vector<absl::Status> Join() {
      for (std::thread& thread : threads_) thread.join();
      return {statuses_, statuses_ + threads_.size()};
    }

   private:
    absl::Status statuses_[16];
    std::atomic<int> ended_{0};
    std::vector<std::thread> threads_;
  };

  // The number of successful calls; the others must have been refused for lack of room.
  static int Served(const std::vector<absl::Status>& statuses) {
    int served = 0;
    for (const absl::Status& status : statuses) {
      served += status.ok() ? 1 : 0;
      EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
    }
    return served;
  }

  // The single line with which a server exits.
  static std::string LastWords(const ExitReport& report, int code) {
    EXPECT_TRUE(report.exited);
    EXPECT_EQ(report.code, code) << report.log;
    std::vector<std::string> found;
    for (const absl::string_view line : absl::StrSplit(report.log, '\n')) {
      if (absl::StartsWith(line, "awqd: ")) found.emplace_back(line);
    }
    EXPECT_EQ(found.size(), 1u) << report.log;
    return found.empty() ? "" : found.front();
  }
};

}  // namespace awqd
