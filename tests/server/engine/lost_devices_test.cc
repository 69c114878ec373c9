// One of several devices fails, recovers, or is full: the errors of its requests, and other
// requests that go on; cancelling, deadlines and draining of requests that several devices compute.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "tests/server/engine/shared_experts_fixture.h"

namespace awqd::engine {
namespace {

using Answer = Machine::Answer;
using ::testing::HasSubstr;

EngineOptions Gathering(int64_t tokens) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Hours(1);  // until the batch is full
  options.batching.max_batch_tokens = tokens;
  return options;
}

class LostDevicesTest : public ::testing::TestWithParam<bool> {
 protected:
  // One token for each of two experts.
  static Choices OfBoth() {
    Choices out = RandomChoices({1, 2, 2, 64, true, 3});
    out.ids = {0, 1};
    return out;
  }
  static Choices OfOne(int32_t expert) {
    Choices out = RandomChoices({1, 1, 2, 64, true, 3});
    out.ids = {expert};
    return out;
  }
  const Mixture mixture_ = RandomMixture({.experts = 2});
};

TEST_P(LostDevicesTest, ExpertsOfADeadDeviceFailAndOthersServe) {
  Machine machine(2, GetParam(), Gathering(1000));
  const PlacedMixture on = Spread(machine, mixture_);
  auto on_both = machine.Submit(Mlp(machine, on, OfBoth()));
  auto on_it = machine.Submit(Mlp(machine, on, OfOne(1)));
  auto on_the_other = machine.Submit(Mlp(machine, on, OfOne(0)));
  machine.member(1).wrapped().Break();
  machine.engine().Hurry();
  for (auto* const lost : {&on_both, &on_it}) {
    const Answer answer = lost->get();
    EXPECT_EQ(answer.status.code(), absl::StatusCode::kInternal) << answer.status;
    EXPECT_TRUE(answer.status.GetPayload(kErrorIdPayload).has_value());
    EXPECT_TRUE(answer.bytes.empty());
  }
  EXPECT_TRUE(on_the_other.get().status.ok());
  // Requests that need the device are refused; others are served.
  const Answer refused = machine.Run(Grouped(machine, on.gate, OfBoth()));
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status.message()), HasSubstr("device cpu:1 has failed"));
  EXPECT_TRUE(machine.Run(Grouped(machine, on.gate, OfOne(0))).status.ok());
  EXPECT_EQ(machine.engine().queued_tasks(), 0);
}

TEST_P(LostDevicesTest, ADeviceThatLivesAgainIsUsedAgain) {
  Machine machine(2, GetParam());
  const PlacedMixture on = Spread(machine, mixture_);
  const Answer before = machine.Run(Mlp(machine, on, OfBoth()));
  ASSERT_TRUE(before.status.ok()) << before.status;
  machine.member(1).wrapped().Break();
  EXPECT_FALSE(machine.Run(Mlp(machine, on, OfBoth())).status.ok());
  machine.member(1).wrapped().Repair();
  const Answer after = machine.Run(Mlp(machine, on, OfBoth()));
  ASSERT_TRUE(after.status.ok()) << after.status;
  EXPECT_TRUE(after.bytes == before.bytes);
}

// A full queue is no reason to try a failed device, because that would hide the real problem.
TEST_P(LostDevicesTest, AFullReplicaSaysSoBesideADeadOne) {
  EngineOptions options = Gathering(100);
  options.batching.max_queued_tasks = 1;
  Machine machine(2, GetParam(), options);
  const PlacedMixture on = Placed(machine, mixture_, false);
  machine.member(0).wrapped().Break();
  auto waits = machine.Submit(Mlp(machine, on, OfBoth()));
  EXPECT_EQ(machine.Run(Mlp(machine, on, OfBoth())).status.code(),
            absl::StatusCode::kResourceExhausted);
  machine.engine().Hurry();
  EXPECT_EQ(waits.get().report.device, "cpu:1");
}

TEST_P(LostDevicesTest, PayloadsAndInlineWeightsGoToDevicesThatWork) {
  Machine machine(3, GetParam());
  EXPECT_EQ(&machine.engine().staging(), &machine.member(0).staging());
  machine.member(0).wrapped().Break();
  EXPECT_EQ(&machine.engine().staging(), &machine.member(1).staging());
  for (int i = 0; i < 4; ++i) {
    const auto placed = machine.engine().Prepare(mixture_.gate[0]);
    ASSERT_TRUE(placed.ok()) << placed.status();
    EXPECT_NE((*placed)->devices(), "cpu:0");
  }
  for (int i : {1, 2}) machine.member(i).wrapped().Break();
  EXPECT_EQ(machine.engine().Prepare(mixture_.gate[0]).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_P(LostDevicesTest, CancelledOrExpiredNoPartRuns) {
  Machine machine(2, GetParam(), Gathering(1000));
  const PlacedMixture on = Spread(machine, mixture_);
  std::promise<absl::Status> cancelled;
  auto handle =
      machine.engine().Submit(std::make_unique<GatedMlpWork>(Mlp(machine, on, OfBoth())), {},
                              [&](const absl::Status& status, const Payload&,
                                  const ExecutionReport&) { cancelled.set_value(status); });
  ASSERT_TRUE(handle.ok()) << handle.status();
  EXPECT_EQ(machine.engine().queued_tasks(), 2);
  handle->Cancel();
  EXPECT_EQ(cancelled.get_future().get().code(), absl::StatusCode::kCancelled);
  const SubmitOptions soon = {.deadline = absl::Now() + absl::Milliseconds(5)};
  EXPECT_EQ(machine.Submit(Mlp(machine, on, OfBoth()), soon).get().status.code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(machine.engine().queued_tasks(), 0);
}

TEST_P(LostDevicesTest, DrainingAnswersWhatWasAccepted) {
  Machine machine(2, GetParam(), Gathering(1000));
  const PlacedMixture on = Spread(machine, mixture_);
  auto accepted = machine.Submit(Mlp(machine, on, OfBoth()));
  machine.engine().Drain();
  EXPECT_TRUE(accepted.get().status.ok());
  EXPECT_EQ(machine.Run(Mlp(machine, on, OfBoth())).status.code(), absl::StatusCode::kUnavailable);
}

// A gated MLP in two stages, of which a device that is lost or a cancelled call ends either, and a
// drain none.
TEST_P(LostDevicesTest, StagesEndTogether) {
  const Mixture wide = RandomMixture({.experts = 2, .middle = 420});
  const auto staged = [&](Machine& machine) {
    const PlacedMixture on = Placed(machine, wide, true);
    const Rounding by_token = {.how = ActivationQuantization::kFloat8PerToken};
    return Fill(machine, OfBoth(),
                GatedMlpWork({on.gate, on.up, on.down, by_token, by_token, by_token}, {}));
  };
  {
    Machine machine(2, GetParam(), Gathering(1000));
    std::promise<absl::Status> cancelled;
    auto handle =
        machine.engine().Submit(std::make_unique<GatedMlpWork>(staged(machine)), {},
                                [&](const absl::Status& status, const Payload&,
                                    const ExecutionReport&) { cancelled.set_value(status); });
    ASSERT_TRUE(handle.ok()) << handle.status();
    EXPECT_EQ(machine.engine().queued_tasks(), 2);
    handle->Cancel();
    EXPECT_EQ(cancelled.get_future().get().code(), absl::StatusCode::kCancelled);
    auto accepted = machine.Submit(staged(machine));
    machine.engine().Drain();
    const Answer answer = accepted.get();
    EXPECT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.bytes.size(), 40u * SizeOf(OfBoth().dtype));
    EXPECT_EQ(machine.Run(staged(machine)).status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(machine.engine().queued_tasks(), 0);
  }
  Machine machine(2, GetParam());
  GatedMlpWork work = staged(machine);
  ASSERT_TRUE(machine.Run(work).status.ok());
  machine.member(1).wrapped().Break();
  const Answer answer = machine.Run(std::move(work));
  EXPECT_FALSE(answer.status.ok());
  EXPECT_TRUE(answer.bytes.empty());
}

INSTANTIATE_TEST_SUITE_P(Memory, LostDevicesTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "shared" : "copied"; });

}  // namespace
}  // namespace awqd::engine
