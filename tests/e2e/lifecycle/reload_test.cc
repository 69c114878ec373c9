// Models of the real server are loaded and unloaded under calls.
#include <atomic>
#include <fstream>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/lifecycle/lifecycle_fixture.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

TEST_F(LifecycleTest, ReloadsUnderLoadWithoutAFailedCall) {
  Start();
  const std::string expected = client_->QuantizedMatmul(OneToken())->output.bytes;
  std::atomic<bool> stop{false};
  std::atomic<int> good{0}, bad{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (!stop) {
        const auto y = client_->QuantizedMatmul(OneToken());
        ++(y.ok() && y->output.shape == std::vector<int64_t>{1, 64} ? good : bad);
      }
    });
  }
  for (int i = 0; i < 50; ++i) {
    const auto loaded = client_->LoadModel("m");
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded.ok() ? loaded->model().version() : -1, i + 2);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(bad, 0);
  EXPECT_GT(good, 0);
  EXPECT_EQ(client_->QuantizedMatmul(OneToken())->output.bytes, expected);
  Stop();
}

TEST_F(LifecycleTest, LoadsAndUnloadsFromManyThreads) {
  Start();
  std::atomic<int> unexpected{0}, good{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 40; ++round) {
        const absl::Status status = i == 0   ? client_->UnloadModel("m")
                                    : i == 1 ? client_->LoadModel("m").status()
                                             : client_->QuantizedMatmul(OneToken()).status();
        good += status.ok() ? 1 : 0;
        const bool fine = status.ok() || absl::IsNotFound(status) || absl::IsUnavailable(status) ||
                          (i == 1 && absl::IsAlreadyExists(status));
        unexpected += fine ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(unexpected, 0);
  EXPECT_GT(good, 0);
  ASSERT_TRUE(client_->LoadModel("m").ok());
  EXPECT_TRUE(client_->QuantizedMatmul(OneToken()).ok());
  Stop();
}

TEST_F(LifecycleTest, UnloadLetsQueuedRequestsFinish) {
  Start({"--max_queue_delay_us=3000000", "--max_queued_requests=6"});
  Calls calls(*client_, 7);
  calls.AwaitFirst();
  EXPECT_TRUE(client_->UnloadModel("m").ok());
  EXPECT_EQ(client_->QuantizedMatmul(OneToken()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Served(calls.Join()), 6);
  const auto info = client_->GetServerInfo();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->devices(0).weights_bytes(), 0) << "freed after the last of them";
  Stop();
}

TEST_F(LifecycleTest, FailedReloadKeepsServing) {
  Start();
  std::ofstream(repository_ / "m/model.safetensors") << "broken";
  const absl::Status status = client_->LoadModel("m").status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("model.safetensors"));
  EXPECT_TRUE(client_->QuantizedMatmul(OneToken()).ok());
  const auto models = client_->ListModels();
  ASSERT_TRUE(models.ok() && models->models_size() == 1);
  EXPECT_EQ(models->models(0).state(), v1::READY);
  EXPECT_FALSE(models->models(0).message().empty());
  Stop();
}

}  // namespace
}  // namespace awqd
