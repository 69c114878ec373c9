// The limits of one client, on a clock of the test's own.
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/retry_delay.h"
#include "server/transport/limits.h"

namespace awqd::transport {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

class ClientLimitsTest : public ::testing::Test {
 protected:
  absl::StatusOr<ClientRequest> Begin(absl::string_view name) {
    return limits_->BeginRequest(name, now_);
  }
  void Limit(const ClientQuota& bounds) { limits_ = std::make_unique<ClientLimiter>(bounds); }

  std::unique_ptr<ClientLimiter> limits_;
  Client::Clock::time_point now_ = Client::Clock::now();
};

TEST_F(ClientLimitsTest, WithoutBoundsNobodyIsRemembered) {
  Limit({});
  EXPECT_FALSE(limits_->any());
  EXPECT_EQ(Begin("a")->client(), nullptr);
  EXPECT_EQ(limits_->clients(), 0);
}

TEST_F(ClientLimitsTest, RequestsInFlight) {
  Limit({.requests_in_flight = 2});
  auto first = *Begin("a");
  auto second = std::make_unique<ClientRequest>(*Begin("a"));
  for (int i = 0; i < 3; ++i) {
    const absl::Status refused = Begin("a").status();
    EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("a: got a request beside 2 in flight"));
    EXPECT_GT(RetryDelayOf(refused), absl::ZeroDuration());
  }
  EXPECT_TRUE(Begin("b").ok()) << "the others have their own";
  second = nullptr;
  EXPECT_TRUE(Begin("a").ok());
}

TEST_F(ClientLimitsTest, RequestsASecond) {
  Limit({.requests_per_second = 4});
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(Begin("a").ok()) << i;
  const absl::Status refused = Begin("a").status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("more than 4 requests a second"));
  EXPECT_EQ(RetryDelayOf(refused), absl::Milliseconds(250));
  now_ += milliseconds(249);
  EXPECT_FALSE(Begin("a").ok());
  now_ += milliseconds(1);
  EXPECT_TRUE(Begin("a").ok()) << "when it was told to come back";
  EXPECT_FALSE(Begin("a").ok());
  EXPECT_TRUE(Begin("b").ok());
  now_ += milliseconds(60000);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(Begin("a").ok()) << "no more is saved up: " << i;
  EXPECT_FALSE(Begin("a").ok());
}

TEST_F(ClientLimitsTest, LessThanOneASecond) {
  Limit({.requests_per_second = 0.5});
  EXPECT_TRUE(Begin("a").ok());
  EXPECT_EQ(RetryDelayOf(Begin("a").status()), absl::Seconds(2));
  now_ += milliseconds(2000);
  EXPECT_TRUE(Begin("a").ok());
}

TEST_F(ClientLimitsTest, BytesOfOneClient) {
  Limit({.bytes_in_flight = 100});
  ByteBudget all(1000);
  const ClientRequest request = *Begin("a"), other = *Begin("b");
  std::vector<ByteLease> leases;
  leases.push_back(*all.AcquireBytes({.client = request.client()}, 60, "request"));
  const absl::Status refused =
      all.AcquireBytes({.client = request.client()}, 41, "request").status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("max_bytes_in_flight_per_client, 100"));
  EXPECT_TRUE(RetryDelayOf(refused).has_value());
  EXPECT_EQ(all.in_flight(), 60) << "what the client could not pay counts nowhere";
  // Any thread may do this, because the lease knows its client.
  EXPECT_FALSE(leases[0].Grow(41, "output").ok());
  EXPECT_TRUE(leases[0].Grow(40, "output").ok());
  EXPECT_EQ(request.client()->bytes()->in_flight(), 100);
  EXPECT_TRUE(all.AcquireBytes({.client = other.client()}, 100, "request").ok());
  leases[0].ShrinkTo(10);
  EXPECT_EQ(request.client()->bytes()->in_flight(), 10);
  leases.clear();
  EXPECT_EQ(request.client()->bytes()->in_flight(), 0);
  EXPECT_EQ(all.in_flight(), 0);
}

TEST_F(ClientLimitsTest, WhatTheServerHasNoRoomForIsNotPaid) {
  Limit({.bytes_in_flight = 100});
  ByteBudget all(50);
  const ClientRequest request = *Begin("a");
  EXPECT_FALSE(all.AcquireBytes({.client = request.client()}, 60, "request").ok());
  EXPECT_EQ(request.client()->bytes()->in_flight(), 0);
}

TEST_F(ClientLimitsTest, MessagesOfAStreamAreRequests) {
  Limit({.requests_in_flight = 3});
  ByteBudget all(0);
  const ClientRequest stream = *Begin("a");
  const Charge charge = {.client = stream.client(), .new_request = true};
  auto first = *all.AcquireBytes(charge, 1, "request");
  auto second = std::make_unique<ByteLease>(*all.AcquireBytes(charge, 1, "request"));
  EXPECT_TRUE(absl::IsResourceExhausted(all.AcquireBytes(charge, 1, "request").status()));
  second = nullptr;
  EXPECT_TRUE(all.AcquireBytes(charge, 1, "request").ok());
}

TEST_F(ClientLimitsTest, ALeaseOutlivesItsRequest) {
  Limit({.requests_in_flight = 1, .bytes_in_flight = 100});
  ByteBudget all(0);
  ByteLease lease;
  {
    const ClientRequest request = *Begin("a");
    lease = *all.AcquireBytes({.client = request.client()}, 70, "request");
  }
  EXPECT_FALSE(lease.Grow(31, "output").ok());
  EXPECT_TRUE(Begin("a").ok());
}

TEST_F(ClientLimitsTest, ClientsThatRestAreForgotten) {
  Limit({.requests_in_flight = 5, .requests_per_second = 10});
  const ClientRequest kept = *Begin("kept");
  for (int i = 0; i < 100000; ++i) {
    now_ += std::chrono::microseconds(100);
    EXPECT_TRUE(Begin(absl::StrCat("peer ", i)).ok());
  }
  // 10000 came in the last second; the table is swept when it has doubled.
  EXPECT_LT(limits_->clients(), 25000);
  EXPECT_EQ(Begin("kept")->client(), kept.client()) << "it has something in flight";
}

TEST_F(ClientLimitsTest, FromManyThreads) {
  Limit({.requests_in_flight = 4, .bytes_in_flight = 1000});
  ByteBudget all(0);
  std::vector<std::thread> threads;
  std::atomic<int> begun{0}, most{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        const auto request = limits_->BeginRequest("a", now_);
        if (!request.ok()) continue;
        most = std::max(most.load(), ++begun);
        const auto lease = all.AcquireBytes({.client = request->client()}, 100, "request");
        EXPECT_TRUE(lease.ok());
        --begun;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most, 4);
  EXPECT_EQ(all.in_flight(), 0);
  EXPECT_EQ(Begin("a")->client()->bytes()->in_flight(), 0);
}

}  // namespace
}  // namespace awqd::transport
