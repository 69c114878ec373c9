// LifecycleTest: a repository with the small model "m", and calls of its product.
#pragma once

#include <atomic>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/synthetic_awq.h"

namespace awqd {

class LifecycleTest : public testing::Test {
 protected:
  LifecycleTest() { SyntheticAwq::Random(256, 64, 64, 1).Write(repository_ / "m"); }

  std::vector<std::string> Args(std::vector<std::string> more = {}) const {
    more.push_back("--model_repository=" + repository_.path());
    return more;
  }

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

  static client::MatmulCall Call(const std::string& model = "m") {
    return {.weight = client::WeightName{model, "layer"},
            .activations =
                *client::Tensor::FromFloats(v1::FP16, {1, 256}, std::vector<float>(256, 0.5f))};
  }

  // Calls in flight, each on a thread of its own.
  class Calls {
   public:
    Calls(client::Client& client, int count) {
      for (int i = 0; i < count; ++i) {
        threads_.emplace_back([this, &client, i] {
          statuses_[i] = client.QuantizedMatmul(Call()).status();
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

  TempFolder repository_;
};

}  // namespace awqd
