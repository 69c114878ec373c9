// Loads, unloads and users of one model on several threads.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <initializer_list>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "server/repository/model_store.h"
#include "tests/server/repository/model_store_fixture.h"

namespace awqd::repository {
namespace {

TEST_F(ModelStoreTest, CancelledLoadsAreUnavailable) {
  const auto first = store_->Load("m");
  ASSERT_TRUE(first.ok());
  store_->CancelLoads();
  EXPECT_EQ(store_->Load("m").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(*store_->Find("m"), *first);
}

TEST_F(ModelStoreTest, WhatIsServedIsNotLoadedAgain) {
  const auto first = store_->LoadUnlessServed("m");
  ASSERT_TRUE(first.ok()) << first.status();
  device_->SetBudget(device_->UsedBytes());  // no room for two versions
  const auto second = store_->LoadUnlessServed("m");
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(*second, *first);
  EXPECT_EQ(store_->LoadUnlessServed("none").status().code(), kNotFound);
  EXPECT_EQ(store_->LoadUnlessServed("../m").status().code(), kInvalid);
}

// Another thread's load is held just before it is served, and then succeeds or fails.
TEST_F(ModelStoreTest, ALoadInProgressIsWaitedFor) {
  for (const bool fails : {false, true}) {
    std::promise<void> begun, release;
    std::atomic<int> loads{0};
    store_->set_before_serving([&](const model::Model&) -> absl::Status {
      if (loads++ > 0) return absl::OkStatus();
      begun.set_value();
      release.get_future().wait();
      return fails ? absl::InternalError("the first load fails") : absl::OkStatus();
    });
    auto theirs = std::async(std::launch::async, [&] { return store_->Load("m"); });
    begun.get_future().wait();
    EXPECT_EQ(store_->Load("m").status().code(), absl::StatusCode::kAlreadyExists);
    auto ours = std::async(std::launch::async, [&] { return store_->LoadUnlessServed("m"); });
    release.set_value();
    const auto model = ours.get();
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(theirs.get().ok(), !fails);
    EXPECT_EQ(loads, fails ? 2 : 1);
    EXPECT_TRUE(store_->Unload("m").ok());
  }
}

TEST_F(ModelStoreTest, WhoWaitsForALoadHearsOfTheEnd) {
  std::promise<void> begun, release;
  store_->set_before_serving([&](const model::Model&) {
    begun.set_value();
    release.get_future().wait();
    return absl::OkStatus();
  });
  auto theirs = std::async(std::launch::async, [&] { return store_->Load("m"); });
  begun.get_future().wait();
  auto ours = std::async(std::launch::async, [&] { return store_->LoadUnlessServed("m"); });
  store_->CancelLoads();
  EXPECT_EQ(ours.get().status().code(), absl::StatusCode::kUnavailable);
  release.set_value();
  EXPECT_TRUE(theirs.get().ok());
}

TEST_F(ModelStoreTest, EightThreadsLoadAndUnloadWhileOthersUseIt) {
  WriteModel("m", 0x22);  // all codes are equal, so that a torn weight would show
  std::atomic<bool> stop{false};
  std::atomic<int> loads{0}, uses{0}, unexpected{0};
  const auto allowed = [&](const absl::Status& status,
                           std::initializer_list<absl::StatusCode> codes) {
    if (status.ok()) return;
    for (absl::StatusCode code : codes) {
      if (status.code() == code) return;
    }
    ++unexpected;
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 40; ++round) {
        const auto model = store_->Load("m");
        loads += model.ok();
        allowed(model.status(), {absl::StatusCode::kAlreadyExists});
        if (round % 3 == i % 3) allowed(store_->Unload("m"), {kNotFound});
        EXPECT_LE(store_->List().size(), 1u);
      }
    });
  }
  std::vector<std::thread> users;
  for (int i = 0; i < 2; ++i) {
    users.emplace_back([&] {
      while (!stop) {
        const auto weight = store_->FindWeight("m", "layers.0.up");
        allowed(weight.status(), {kNotFound, absl::StatusCode::kUnavailable});
        if (!weight.ok()) continue;
        std::vector<uint16_t> out(64 * 128);
        const MatrixView view = {out.data(), DType::kFp16, 64, 128};
        allowed(Dequantize({.weight = (*weight)->parts[0].weight.get(), .out = view}, nullptr,
                           StreamView{}),
                {});
        if (out.front() != out.back()) ++unexpected;
        ++uses;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(store_->Load("m").ok());
  while (uses == 0) std::this_thread::yield();
  stop = true;
  for (std::thread& user : users) user.join();
  EXPECT_EQ(unexpected, 0);
  EXPECT_GT(loads, 0);
  EXPECT_TRUE(store_->Unload("m").ok());
  EXPECT_EQ(device_->UsedBytes(), 0);
}

}  // namespace
}  // namespace awqd::repository
