// PeerCalls: what the connections of one peer, and all peers, may have in flight together.
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/transport/connection.h"

namespace awqd::transport {
namespace {

using Place = PeerCalls::Place;

// A connection and the slots of its calls.
class Connected {
 public:
  Connected(PeerCalls* all, std::string peer) : all_(all), peer_(std::move(peer)) {}
  ~Connected() { End(); }
  Connected(Connected&&) = default;

  Place Call(bool asks_to_begin = true) {
    const auto name = [this] { return peer_; };
    all_->CountArrival(connection_.get(), name, now_);
    places_.push_back(all_->Admit(connection_.get(), asks_to_begin, name));
    return places_.back();
  }
  // Begins `count` calls; returns how many were allowed.
  int64_t Calls(int count) {
    int64_t taken = 0;
    for (int i = 0; i < count; ++i) taken += Call() == Place::kAdmitted ? 1 : 0;
    return taken;
  }
  void End() {
    for (const Place place : places_) PeerCalls::Release(connection_.get(), place);
    places_.clear();
  }
  void SetTime(std::chrono::milliseconds time) {
    now_ = std::chrono::steady_clock::time_point(time);
  }

 private:
  PeerCalls* all_;
  std::string peer_;
  std::unique_ptr<Connection> connection_ = std::make_unique<Connection>();
  std::vector<Place> places_;
  std::chrono::steady_clock::time_point now_;
};

TEST(PeerCallsTest, ConnectionsOfOnePeerLeaveOneAnotherAPart) {
  PeerCalls calls({.per_peer = 100, .total = 1000});
  Connected first(&calls, "ipv4:10.0.0.7"), second(&calls, "ipv4:10.0.0.7");
  EXPECT_EQ(first.Calls(80), 50) << "one alone has half";
  EXPECT_EQ(second.Calls(80), 25);
  first.End();
  EXPECT_EQ(second.Calls(80), 25) << "there is room again";
}

TEST(PeerCallsTest, TheProductOfCallsAndConnectionsIsBounded) {
  PeerCalls calls({.per_peer = 4096, .total = 16384});
  std::vector<Connected> connections;
  int64_t begun = 0;
  for (int i = 0; i < 1000; ++i) {
    connections.emplace_back(&calls, "ipv4:10.0.0.7");
    begun += connections.back().Calls(512);
  }
  EXPECT_GT(begun, 4000);
  EXPECT_LE(begun, 4096);
}

TEST(PeerCallsTest, AllPeersAreBoundedTogetherAndLeaveOneAnotherAPart) {
  PeerCalls calls({.per_peer = 1000, .total = 1200});
  Connected first(&calls, "ipv4:10.0.0.7"), other(&calls, "ipv4:10.0.0.8");
  EXPECT_EQ(first.Calls(1000), 500);
  EXPECT_EQ(other.Calls(1000), 350) << "half of what the first one has left";
  std::vector<Connected> more;
  for (int i = 0; i < 100; ++i) {
    more.emplace_back(&calls, absl::StrCat("ipv4:10.0.1.", i));
    more.back().Calls(1000);
  }
  first.End();
  EXPECT_GT(first.Calls(1000), 200);
}

TEST(PeerCallsTest, RefusedCallsThatNobodyReadsAreBoundedToo) {
  PeerCalls calls({.per_peer = 10, .total = 1000});
  Connected connection(&calls, "unix");
  for (int i = 0; i < 10; ++i) EXPECT_EQ(connection.Call(false), Place::kRejected);
  EXPECT_EQ(connection.Call(false), Place::kDropped);
  EXPECT_EQ(connection.Call(true), Place::kAdmitted) << "they are counted apart";
  connection.End();
  EXPECT_EQ(connection.Call(false), Place::kRejected);
}

TEST(PeerCallsTest, TellsOfACrowdOncePerMoment) {
  std::vector<std::string> crowded;
  PeerCalls calls({.crowded = [&](const std::string& peer) { crowded.push_back(peer); }});
  Connected connection(&calls, "ipv4:10.0.0.7"), calm(&calls, "ipv4:10.0.0.8");
  connection.Calls(8 + 127);  // the first few are free
  EXPECT_THAT(crowded, ::testing::IsEmpty());
  connection.Calls(1000);
  EXPECT_THAT(crowded, ::testing::ElementsAre("ipv4:10.0.0.7"));
  connection.SetTime(std::chrono::milliseconds(1000));
  connection.Calls(128);
  EXPECT_EQ(crowded.size(), 2u);
  for (int i = 0; i < 100; ++i) {
    calm.SetTime(std::chrono::milliseconds(30 * i));
    calm.Calls(127);
  }
  EXPECT_EQ(crowded.size(), 2u);
}

TEST(PeerCallsTest, PeersAreForgottenWithTheirConnections) {
  PeerCalls calls({});
  for (int i = 0; i < 1000; ++i) Connected(&calls, absl::StrCat("ipv4:10.0.0.", i)).Call();
  EXPECT_LE(calls.size(), 64);
}

TEST(PeerCallsTest, ThreadsShareAPeer) {
  PeerCalls calls({.per_peer = 1000, .total = 10'000});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        Connected connection(&calls, "ipv4:10.0.0.7");
        connection.Calls(50);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Connected after(&calls, "ipv4:10.0.0.7");
  EXPECT_EQ(after.Calls(1000), 500) << "all was given back";
}

}  // namespace
}  // namespace awqd::transport
