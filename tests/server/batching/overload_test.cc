// BatchQueue under more load than a device can take, in simulated time: it refuses early, computes
// what arrives in time, and little else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kernels/base/retry_delay.h"
#include "server/batching/batch_queue.h"

namespace awqd::batching {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kTokens = 64;

// A request for 64 tokens of one of several weights.
class Request final : public Task {
 public:
  Request(const int* weight, int priority_wanted, absl::Time must_arrive) : weight_(weight) {
    priority = priority_wanted;
    deadline = must_arrive;
  }
  int64_t tokens() const override { return kTokens; }
  int64_t bytes() const override { return 1; }
  BatchKey key() const override { return {.subject = weight_}; }
  RunKey run_key() const override {
    return {.operation = &kOperation, .shape = reinterpret_cast<uintptr_t>(weight_)};
  }
  void Fail(const absl::Status&) override {}

 private:
  static constexpr int kOperation = 0;
  const int* const weight_;
};

// A device that takes 1 ms for a batch and 60 us for a token, give or take a tenth: 4.84 ms for a
// request, 244 requests a second in batches of 50 ms.
class Device {
 public:
  static constexpr absl::Duration kAlone = absl::Microseconds(1000 + 60 * kTokens);
  static constexpr double kPeak = 244;

  absl::Duration Run(int64_t tokens) {
    return absl::Microseconds(1000 + 60 * tokens) * (0.9 + 0.2 * uniform_(random_));
  }
  absl::Duration UntilNextArrival(double per_second) {
    return absl::Seconds(std::exponential_distribution<double>(per_second)(random_));
  }
  int Choose(int count) { return static_cast<int>(random_() % count); }

 private:
  std::mt19937 random_{1};
  std::uniform_real_distribution<double> uniform_;
};

struct Outcome {
  std::map<int, int64_t> arrived, in_time;  // by priority
  int64_t late = 0;                         // computed in vain
  absl::Duration longest_wait;              // of a task that ran

  int64_t all_in_time() const {
    int64_t sum = 0;
    for (const auto& [priority, count] : in_time) sum += count;
    return sum;
  }
};

struct Load {
  double times_peak = 1;
  absl::Duration deadline = absl::InfiniteDuration();
  int weights = 1;
  double urgent = 0;  // the share of requests with priority 1
  absl::Duration length = absl::Seconds(60);
};

Outcome Simulate(const Load& load) {
  Device device;
  BatchQueue queue{BatchOptions()};
  int weights[8] = {};
  Outcome out;
  absl::Time now = absl::FromUnixSeconds(1000);
  const absl::Time end = now + load.length;
  absl::Time arrival = now, batch_ends = absl::InfiniteFuture(), expected_end = now, started = now;
  Batch running;
  while (now < end) {
    now = std::min({arrival, batch_ends, queue.NextExpiry()});
    (void)queue.TakeExpired(now);
    if (now == batch_ends) {
      queue.RecordRun(running.run_key, running.load, now - started, now);
      for (const auto& task : running.tasks) {
        const bool in_time = now <= task->deadline;
        in_time ? ++out.in_time[task->priority] : ++out.late;
        queue.RecordAnswer(in_time);
      }
      batch_ends = absl::InfiniteFuture();
    }
    if (now == arrival) {
      const int urgent = device.Choose(1000) < 1000 * load.urgent ? 1 : 0;
      ++out.arrived[urgent];
      std::unique_ptr<Task> task = std::make_unique<Request>(&weights[device.Choose(load.weights)],
                                                             urgent, now + load.deadline);
      const absl::Duration left = batch_ends == absl::InfiniteFuture()
                                      ? absl::ZeroDuration()
                                      : std::max(expected_end - now, absl::ZeroDuration());
      const auto ticket = queue.Push(&task, now, left);
      if (!ticket.ok()) {
        EXPECT_TRUE(absl::IsResourceExhausted(ticket.status())) << ticket.status();
        EXPECT_TRUE(RetryDelayOf(ticket.status()).has_value()) << ticket.status();
      }
      arrival = now + device.UntilNextArrival(load.times_peak * Device::kPeak);
    }
    if (batch_ends != absl::InfiniteFuture()) continue;
    running = queue.Pop(now, false);
    if (running.empty()) continue;
    started = now;
    for (const auto& task : running.tasks) {
      out.longest_wait = std::max(out.longest_wait, now - task->enqueued);
    }
    batch_ends = now + device.Run(running.tokens);
    expected_end = now + running.expected;
  }
  return out;
}

TEST(Overload, GoodputHoldsWhateverComes) {
  for (const int weights : {1, 4}) {
    for (const int times_alone : {3, 5, 10, 40}) {
      for (const double times_peak : {1.25, 1.5, 3.0, 10.0}) {
        const Load load = {
            .times_peak = times_peak, .deadline = times_alone * Device::kAlone, .weights = weights};
        const Outcome got = Simulate(load);
        const auto good = static_cast<double>(got.all_in_time());
        const std::string what =
            absl::StrCat(weights, " weights, deadline ", times_alone, " x alone, load ", times_peak,
                         " x peak: ", good / 60, " good a second, ", got.late, " late");
        // Requests of four weights merge less, so that the device can do less: 206 a second alone.
        // The shortest deadline leaves time for batches of two, 229 a second without a pause.
        const double peak = weights == 1 ? Device::kPeak : 206;
        EXPECT_GE(good / 60, (times_alone == 3 ? 0.8 : 0.9) * peak) << what;
        EXPECT_LE(static_cast<double>(got.late), 0.02 * good) << what;
      }
    }
  }
}

TEST(Overload, WithoutDeadlinesNobodyWaitsLongerThanTheLimit) {
  const Outcome got = Simulate({.times_peak = 3});
  EXPECT_GE(static_cast<double>(got.all_in_time()) / 60, 0.9 * Device::kPeak);
  EXPECT_LT(got.longest_wait, absl::Milliseconds(1200));
}

TEST(Overload, UrgentRequestsArrive) {
  for (const absl::Duration deadline : {40 * Device::kAlone, absl::InfiniteDuration()}) {
    const Outcome got =
        Simulate({.times_peak = 3, .deadline = deadline, .weights = 2, .urgent = 0.1});
    EXPECT_GE(static_cast<double>(got.in_time.at(1)), 0.98 * static_cast<double>(got.arrived.at(1)))
        << deadline;
    EXPECT_GE(static_cast<double>(got.all_in_time()) / 60, 0.85 * Device::kPeak) << deadline;
  }
}

TEST(Overload, BelowThePeakNothingIsRefused) {
  for (const absl::Duration deadline : {40 * Device::kAlone, absl::InfiniteDuration()}) {
    const Outcome got = Simulate({.times_peak = 0.7, .deadline = deadline});
    EXPECT_GE(static_cast<double>(got.in_time.at(0)),
              0.999 * static_cast<double>(got.arrived.at(0)))
        << deadline;
  }
}

class AdmissionByTime : public ::testing::Test {
 protected:
  absl::Status Push(absl::Duration deadline, absl::Duration running = absl::ZeroDuration()) {
    std::unique_ptr<Task> task = std::make_unique<Request>(&weight_, 0, now_ + deadline);
    return queue_.Push(&task, now_, running).status();
  }
  void Learn(absl::Duration took) {
    const Request like(&weight_, 0, now_);
    for (int i = 0; i < 8; ++i) queue_.RecordRun(like.run_key(), kTokens, took, now_);
  }

  const int weight_ = 0;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  BatchQueue queue_{BatchOptions()};
};

TEST_F(AdmissionByTime, ADeadlineThatCannotBeMetIsRefusedAndSaysWhen) {
  Learn(absl::Milliseconds(4));
  EXPECT_TRUE(Push(absl::Milliseconds(6)).ok());
  const absl::Status refused = Push(absl::Milliseconds(6), absl::Milliseconds(10));
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("deadline: got 6ms, expected at least"));
  EXPECT_GT(*RetryDelayOf(refused), absl::Milliseconds(5));
  EXPECT_EQ(queue_.refused().too_late, 1);
}

TEST_F(AdmissionByTime, AnIdleDeviceTriesWhatItIsNotSureOf) {
  Learn(absl::Milliseconds(100));
  EXPECT_FALSE(Push(absl::Milliseconds(50)).ok());
  now_ += absl::Seconds(2);
  EXPECT_TRUE(Push(absl::Milliseconds(50)).ok());
}

TEST_F(AdmissionByTime, ATaskThatTakesLongIsNotRefusedForIt) {
  Learn(absl::Seconds(30));
  EXPECT_TRUE(Push(absl::InfiniteDuration()).ok());
}

TEST_F(AdmissionByTime, AQueueThatIsTooLongSaysSo) {
  const absl::Status refused = Push(absl::InfiniteDuration(), absl::Seconds(3));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("queue: about 3s of work waits"));
  EXPECT_EQ(*RetryDelayOf(refused), absl::Seconds(2));
  EXPECT_EQ(queue_.refused().too_long, 1);
}

// Callers without deadlines whose requests take long wait for each other, as they always have.
TEST_F(AdmissionByTime, ATaskThatTakesLongMayWaitLonger) {
  Learn(absl::Milliseconds(160));
  EXPECT_TRUE(Push(absl::InfiniteDuration(), absl::Seconds(9)).ok());
  EXPECT_FALSE(Push(absl::InfiniteDuration(), absl::Seconds(11)).ok());
}

TEST_F(AdmissionByTime, ATaskExpiresWhenItCanNoLongerArrive) {
  Learn(absl::Milliseconds(4));
  ASSERT_TRUE(Push(absl::InfiniteDuration()).ok());
  ASSERT_TRUE(Push(absl::Milliseconds(20)).ok());
  EXPECT_THAT(queue_.TakeExpired(now_ + absl::Milliseconds(14)), ::testing::IsEmpty());
  EXPECT_EQ(queue_.TakeExpired(now_ + absl::Milliseconds(16)).size(), 1);
}

TEST_F(AdmissionByTime, ABatchEndsBeforeTheFirstDeadlineInIt) {
  Learn(absl::Milliseconds(4));
  ASSERT_TRUE(Push(absl::Milliseconds(11)).ok());
  for (int i = 0; i < 9; ++i) ASSERT_TRUE(Push(absl::InfiniteDuration()).ok());
  EXPECT_EQ(queue_.Pop(now_, false).tasks.size(), 2);
}

// The results must be sent before the deadline, too.
TEST_F(AdmissionByTime, SendingCountsIntoTheTimeThatATaskTakes) {
  Learn(absl::Milliseconds(4));
  const auto push = [&](absl::Duration to_send) {
    std::unique_ptr<Task> task =
        std::make_unique<Request>(&weight_, 0, now_ + absl::Milliseconds(20));
    task->to_send = to_send;
    return queue_.Push(&task, now_, absl::Milliseconds(5)).status();
  };
  EXPECT_TRUE(push(absl::Milliseconds(1)).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(push(absl::Milliseconds(12))));
  EXPECT_LE(queue_.NextExpiry(), now_ + absl::Milliseconds(15));
}

TEST_F(AdmissionByTime, ABatchTakesNoLongerThanItsLimit) {
  Learn(absl::Milliseconds(4));
  for (int i = 0; i < 30; ++i) ASSERT_TRUE(Push(absl::InfiniteDuration()).ok());
  const Batch batch = queue_.Pop(now_, false);
  EXPECT_EQ(batch.tasks.size(), 12);
  EXPECT_EQ(batch.expected, absl::Milliseconds(48));
}

// Nobody has read such a request, so that only the deadline counts.
TEST_F(AdmissionByTime, ArrivalsAreRefusedUnreadButForSome) {
  Learn(absl::Milliseconds(4));
  ASSERT_TRUE(Push(absl::InfiniteDuration()).ok());
  const auto check = [&] {
    int refused = 0;
    for (int i = 0; i < 160; ++i) {
      refused +=
          queue_.CheckArrival(now_ + absl::Milliseconds(20), now_, absl::Milliseconds(30)).ok() ? 0
                                                                                                : 1;
    }
    return refused;
  };
  EXPECT_EQ(check(), 150);
  EXPECT_TRUE(queue_.CheckArrival(now_ + absl::Seconds(1), now_, absl::Milliseconds(30)).ok());
  // Once priorities differ, each request must be read.
  std::unique_ptr<Task> urgent = std::make_unique<Request>(&weight_, 1, absl::InfiniteFuture());
  ASSERT_TRUE(queue_.Push(&urgent, now_).ok());
  EXPECT_EQ(check(), 0);
}

}  // namespace
}  // namespace awqd::batching
