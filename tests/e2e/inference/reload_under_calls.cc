// Reloads a model while threads call it, and checks every answer.
#include "tests/e2e/inference/reload_under_calls.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace awqd {

void ReloadUnderCalls(client::Client& client, const std::string& model, int loads, int right,
                      const std::function<bool()>& answers_right) {
  std::atomic<bool> stop{false};
  std::atomic<int> were_right{0}, were_wrong{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      while (!stop) (answers_right() ? were_right : were_wrong) += 1;
    });
  }
  for (int i = 0; i < loads; ++i) EXPECT_TRUE(client.LoadModel(model).ok());
  while (were_right < right && were_wrong == 0) std::this_thread::yield();
  stop = true;
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(were_wrong, 0);
  EXPECT_TRUE(client.UnloadModel(model).ok());
  const auto info = client.GetServerInfo();
  ASSERT_TRUE(info.ok());
  for (const v1::DeviceStatus& device : info->devices()) EXPECT_EQ(device.weights_bytes(), 0);
}

}  // namespace awqd
