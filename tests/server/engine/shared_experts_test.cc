// Works of experts on several CPU devices against one: expert parallel, columns, and the middle of
// a gated MLP; every count of experts and choices.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/engine/shared_experts_fixture.h"
#include "tests/testing/matchers.h"

namespace awqd::engine {
namespace {

using Answer = Machine::Answer;
using ::testing::HasSubstr;

class SharedExpertsTest : public ::testing::TestWithParam<bool> {
 protected:
  // Machines of one, two and three devices.
  Machine& machine(size_t devices) {
    auto& made = machines_[devices];
    if (made == nullptr) made = std::make_unique<Machine>(devices, GetParam());
    return *made;
  }
  std::map<size_t, std::unique_ptr<Machine>> machines_;
};

std::vector<double> Doubles(const std::string& bytes, DType dtype) {
  const std::vector<uint8_t> raw(bytes.begin(), bytes.end());
  std::vector<double> out;
  for (size_t i = 0; i < raw.size() / SizeOf(dtype); ++i) {
    out.push_back(testing::GetElement(raw, dtype, static_cast<int64_t>(i)));
  }
  return out;
}

// Allows another order of sums in FP32, and one rounding.
void ExpectNear(const Answer& got, const Answer& want, DType dtype) {
  ASSERT_TRUE(got.status.ok()) << got.status;
  ASSERT_EQ(got.bytes.size(), want.bytes.size());
  if (want.bytes.empty()) return;
  const std::vector<uint8_t> raw(got.bytes.begin(), got.bytes.end());
  const double rounding = dtype == DType::kFp16 ? 0x1p-11 : dtype == DType::kBf16 ? 0x1p-8 : 0;
  EXPECT_LE(testing::FrobeniusError(raw, dtype, Doubles(want.bytes, dtype)), 0x1p-18 + rounding);
}

// The cases of one device: ragged, empty, and all choices of all tokens.
std::vector<ChoicesSpec> Cases(int64_t experts, int64_t k) {
  std::vector<ChoicesSpec> out;
  for (int64_t top_k = 1; top_k <= 8; ++top_k) {
    for (int64_t rows : {1, 7}) {
      out.push_back({rows, top_k, experts, k, top_k % 2 == 0, static_cast<uint64_t>(out.size())});
      out.push_back({rows, top_k, experts, k, top_k % 2 != 0, static_cast<uint64_t>(out.size())});
    }
  }
  for (bool summed : {false, true}) {
    out.push_back({0, 2, experts, k, summed, 70});
    out.push_back({33, 3, experts, k, summed, 71});
  }
  return out;
}

TEST_P(SharedExpertsTest, SpreadExpertsHaveTheBitsOfOneDevice) {
  for (int64_t experts : {1, 2, 8, 64}) {
    const Mixture mixture = RandomMixture({.experts = experts});
    const PlacedMixture on_one = Placed(machine(1), mixture, false);
    for (size_t devices : {2, 3}) {
      const PlacedMixture spread = Spread(machine(devices), mixture);
      EXPECT_EQ(spread.gate->expert_parallel(), experts > 1);
      for (const ChoicesSpec& spec : Cases(experts, 64)) {
        SCOPED_TRACE(absl::StrCat(devices, " devices, ", experts, " experts, ", spec.rows,
                                  " tokens, top ", spec.top_k, spec.summed ? ", summed" : ""));
        const Choices choices = RandomChoices(spec);
        const Answer grouped = machine(1).Run(Grouped(machine(1), on_one.gate, choices));
        ASSERT_TRUE(grouped.status.ok()) << grouped.status;
        const Answer answer = machine(devices).Run(Grouped(machine(devices), spread.gate, choices));
        ASSERT_TRUE(answer.status.ok()) << answer.status;
        EXPECT_TRUE(answer.bytes == grouped.bytes);
        const Answer mlp = machine(1).Run(Mlp(machine(1), on_one, choices));
        const Answer shared = machine(devices).Run(Mlp(machine(devices), spread, choices));
        ASSERT_TRUE(shared.status.ok()) << shared.status;
        EXPECT_TRUE(shared.bytes == mlp.bytes);
      }
    }
  }
}

TEST_P(SharedExpertsTest, AllChoicesMayGoToOneExpert) {
  const Mixture mixture = RandomMixture({.experts = 8});
  const PlacedMixture on_one = Placed(machine(1), mixture, false);
  const PlacedMixture spread = Spread(machine(3), mixture);
  for (bool summed : {false, true}) {
    Choices choices = RandomChoices({9, 2, 8, 64, summed, 4});
    std::fill(choices.ids.begin(), choices.ids.end(), 5);
    const Answer expected = machine(1).Run(Mlp(machine(1), on_one, choices));
    const Answer answer = machine(3).Run(Mlp(machine(3), spread, choices));
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_TRUE(answer.bytes == expected.bytes);
    EXPECT_EQ(answer.report.device, "cpu:2") << "no other device is asked";
  }
}

TEST_P(SharedExpertsTest, ABiasOfTheRequestGoesWithItsExperts) {
  const Mixture mixture = RandomMixture({.experts = 5});
  const Choices choices = RandomChoices({6, 3, 5, 64, true, 8});
  std::vector<float> bias;
  for (int i = 0; i < 5 * 72; ++i) bias.push_back(0.01f * static_cast<float>(i));
  const auto run = [&](Machine& on, std::shared_ptr<const model::WeightStack> stack) {
    GroupedMatmulWork work = Grouped(on, std::move(stack), choices);
    work.bias = bias;
    return on.Run(std::move(work));
  };
  const Answer expected = run(machine(1), Placed(machine(1), mixture, false).gate);
  const Answer answer = run(machine(2), Spread(machine(2), mixture).gate);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_TRUE(answer.bytes == expected.bytes);
}

// Biases of the request, constants of the activation function, and a shared expert, which is whole
// on every device where experts are spread.
TEST_P(SharedExpertsTest, SharedExpertsAndBiasesGoToTheirDevices) {
  constexpr int64_t kExperts = 5, kMiddle = 420;
  const Mixture mixture = RandomMixture({.experts = kExperts, .middle = kMiddle});
  const Mixture alone = RandomMixture({.experts = 1, .middle = 400});
  const auto floats = [](int64_t count, float factor) {
    std::vector<float> out;
    for (int64_t i = 0; i < count; ++i) out.push_back(factor * static_cast<float>(i % 97 - 48));
    return out;
  };
  for (bool biased : {false, true}) {
    for (bool gated : {false, true}) {
      for (int64_t rows : {0, 1, 7}) {
        const Choices choices = RandomChoices({rows, 3, kExperts, 64, true, 8});
        const auto run = [&](Machine& on, const PlacedMixture& experts,
                             const PlacedMixture& shared) {
          GatedMlpWork work({experts.gate, experts.up, experts.down},
                            {shared.gate, shared.up, shared.down});
          work = Fill(on, choices, std::move(work));
          work.activation = ActivationFunction::kSwigluOai;
          work.parameters = {.limit = 2, .alpha = 1.5f};
          if (biased) work.gate_up_bias = floats(2 * kExperts * kMiddle, 0.01f);
          if (biased) work.down_bias = floats(kExperts * 40, 0.02f);
          if (gated) work.shared_expert_gate = floats(64, 0.003f);
          return on.Run(std::move(work));
        };
        const Answer expected =
            run(machine(1), Placed(machine(1), mixture, false), Placed(machine(1), alone, false));
        ASSERT_TRUE(expected.status.ok()) << expected.status;
        for (size_t devices : {2, 3}) {
          SCOPED_TRACE(absl::StrCat(devices, " devices, ", rows, " tokens", biased ? ", bias" : "",
                                    gated ? ", gated" : ""));
          Machine& on = machine(devices);
          const Answer spread = run(on, Spread(on, mixture), Placed(on, alone, false));
          ASSERT_TRUE(spread.status.ok()) << spread.status;
          EXPECT_TRUE(spread.bytes == expected.bytes);
          ExpectNear(run(on, Placed(on, mixture, true), Placed(on, alone, true)), expected,
                     choices.dtype);
        }
      }
    }
  }
}

// E4M3 activations are multiplied as the numbers that they stand for; what enters down may be
// rounded too, by a scale of each token that depends on all devices.
TEST_P(SharedExpertsTest, MlpsOfE4m3Activations) {
  using enum ActivationQuantization;
  constexpr int64_t kK = 200;
  const Mixture mixture = RandomMixture({.experts = 4, .k = kK, .middle = 420});
  const Mixture alone = RandomMixture({.experts = 1, .k = kK, .middle = 400});
  for (bool blocks : {false, true}) {
    for (ActivationQuantization middle : {kNone, kFloat8PerToken, kFloat8PerBlock}) {
      for (int64_t rows : {0, 1, 7}) {
        const SentChoices sent = RandomSent({rows, 3, 4, kK, true, 8}, blocks);
        const auto run = [&](Machine& on, const PlacedMixture& experts, const PlacedMixture& shared,
                             bool codes) {
          const Rounding in = codes ? sent.rounding : Rounding(), down = {.how = middle};
          GatedMlpWork work({experts.gate, experts.up, experts.down, in, in, down},
                            {shared.gate, shared.up, shared.down, in, in, down});
          work = Fill(on, codes ? sent.codes : sent.floats, std::move(work));
          work.out_dtype = DType::kFp32;
          if (codes) work.token_scales = sent.scales;
          for (int64_t i = 0; i < kK; ++i) work.shared_expert_gate.push_back(0.001f * (i % 9));
          return on.Run(std::move(work));
        };
        SCOPED_TRACE(absl::StrCat(rows, " tokens, how ", static_cast<int>(middle),
                                  blocks ? ", blocks" : ""));
        const PlacedMixture on_one = Placed(machine(1), mixture, false);
        const PlacedMixture shared = Placed(machine(1), alone, false);
        const Answer expected = run(machine(1), on_one, shared, false);
        ASSERT_TRUE(expected.status.ok()) << expected.status;
        const Answer answer = run(machine(1), on_one, shared, true);
        ASSERT_TRUE(answer.status.ok()) << answer.status;
        EXPECT_TRUE(answer.bytes == expected.bytes);
        for (size_t devices : {2, 3}) {
          Machine& on = machine(devices);
          const Answer spread = run(on, Spread(on, mixture), Placed(on, alone, false), true);
          ASSERT_TRUE(spread.status.ok()) << spread.status;
          EXPECT_TRUE(spread.bytes == expected.bytes);
          ExpectNear(run(on, Placed(on, mixture, true), Placed(on, alone, true), true), expected,
                     DType::kFp32);
        }
      }
    }
  }
}

TEST_P(SharedExpertsTest, ProductsOfE4m3Activations) {
  const Mixture mixture = RandomMixture({.experts = 4, .k = 200, .middle = 420});
  for (bool blocks : {false, true}) {
    for (bool summed : {false, true}) {
      for (bool down : {false, true}) {
        const SentChoices sent = RandomSent({9, 3, 4, down ? 420 : 200, summed, 5}, blocks);
        const auto run = [&](Machine& on, const PlacedMixture& placed, bool codes) {
          GroupedMatmulWork work =
              Grouped(on, down ? placed.down : placed.gate, codes ? sent.codes : sent.floats);
          work.out_dtype = DType::kFp32;
          if (codes) work.rounding = sent.rounding, work.token_scales = sent.scales;
          return on.Run(std::move(work));
        };
        const Answer expected = run(machine(1), Placed(machine(1), mixture, false), false);
        ASSERT_TRUE(expected.status.ok()) << expected.status;
        EXPECT_TRUE(run(machine(1), Placed(machine(1), mixture, false), true).bytes ==
                    expected.bytes);
        EXPECT_TRUE(run(machine(3), Spread(machine(3), mixture), true).bytes == expected.bytes);
        ExpectNear(run(machine(3), Placed(machine(3), mixture, true), true), expected,
                   DType::kFp32);
      }
    }
  }
}

TEST_P(SharedExpertsTest, ASharedExpertElsewhereIsRefused) {
  const Mixture mixture = RandomMixture({.experts = 2, .middle = 420});
  const Mixture narrow = RandomMixture({.experts = 1, .middle = 128});  // not cut in the middle
  const Choices choices = RandomChoices({2, 1, 2, 64, true, 1});
  Machine& on = machine(2);
  const PlacedMixture cut = Placed(on, mixture, true), shared = Placed(on, narrow, true);
  GatedMlpWork work({cut.gate, cut.up, cut.down}, {shared.gate, shared.up, shared.down});
  const Answer answer = on.Run(Fill(on, choices, std::move(work)));
  EXPECT_FALSE(answer.status.ok());
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("GatedMlp: got "));
}

// More choices than a batch may have, so each device runs them in steps.
TEST_P(SharedExpertsTest, ALargeOneRunsInSteps) {
  EngineOptions options;
  options.batching.max_batch_tokens = 8;
  Machine small(2, GetParam(), options);
  const Mixture mixture = RandomMixture({.experts = 4});
  for (bool summed : {false, true}) {
    const Choices choices = RandomChoices({41, 3, 4, 64, summed, 9});
    const Answer expected =
        machine(1).Run(Mlp(machine(1), Placed(machine(1), mixture, false), choices));
    const Answer answer = small.Run(Mlp(small, Spread(small, mixture), choices));
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_TRUE(answer.bytes == expected.bytes);
  }
}

TEST_P(SharedExpertsTest, WhatGathersRunsOnceOnEachDevice) {
  const Mixture mixture = RandomMixture({.experts = 2});
  const PlacedMixture on_one = Placed(machine(1), mixture, false);
  EngineOptions options;
  options.batching.max_queue_delay = absl::Minutes(1);  // the last one fills the batch
  options.batching.max_batch_tokens = 9;
  Machine both(2, GetParam(), options);
  const PlacedMixture spread = Spread(both, mixture);
  std::vector<Choices> requests;
  std::vector<std::future<Answer>> answers;
  for (int64_t rows : {1, 3, 5}) {
    // Each token goes to one expert on each device.
    requests.push_back(RandomChoices({rows, 2, 2, 64, true, 12}));
    for (size_t i = 0; i < requests.back().ids.size(); ++i) requests.back().ids[i] = i % 2;
    answers.push_back(both.Submit(Mlp(both, spread, requests.back())));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    const Answer answer = answers[i].get();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.report.batch_requests, 3);
    EXPECT_EQ(answer.report.batch_tokens, 9);
    EXPECT_EQ(answer.report.device, "cpu:0,cpu:1");
    EXPECT_TRUE(answer.bytes == machine(1).Run(Mlp(machine(1), on_one, requests[i])).bytes);
  }
}

TEST_P(SharedExpertsTest, ColumnsOfExpertsHaveTheBitsOfOneDevice) {
  for (int64_t experts : {1, 2, 8, 64}) {
    const Mixture mixture = RandomMixture({.experts = experts, .middle = 200});
    const auto on_one = machine(1).Stack(mixture.gate, model::Placing::kWhole);
    for (size_t devices : {2, 3}) {
      const auto cut = machine(devices).Stack(mixture.gate, model::Placing::kColumns);
      ASSERT_TRUE(cut->partitioned());
      for (const ChoicesSpec& spec : Cases(experts, 64)) {
        const Choices choices = RandomChoices(spec);
        const Answer expected = machine(1).Run(Grouped(machine(1), on_one, choices));
        const Answer answer = machine(devices).Run(Grouped(machine(devices), cut, choices));
        ASSERT_TRUE(answer.status.ok()) << answer.status;
        EXPECT_TRUE(answer.bytes == expected.bytes)
            << devices << " devices, " << experts << " experts, " << spec.rows << " tokens";
      }
    }
  }
}

// The middle is partitioned; the devices' results for a token are added in their order.
TEST_P(SharedExpertsTest, MlpsAreCutInTheMiddle) {
  for (int64_t experts : {1, 2, 8, 64}) {
    const Mixture mixture = RandomMixture({.experts = experts, .middle = 420});
    const PlacedMixture on_one = Placed(machine(1), mixture, false);
    for (size_t devices : {2, 3}) {
      const PlacedMixture cut = Placed(machine(devices), mixture, true);
      ASSERT_TRUE(cut.down->experts.front()->partitioned_at_rows());
      for (const ChoicesSpec& spec : Cases(experts, 64)) {
        if (experts == 64 && spec.rows == 7) continue;  // many weights, but no new case
        SCOPED_TRACE(absl::StrCat(devices, " devices, ", experts, " experts, ", spec.rows,
                                  " tokens, top ", spec.top_k, spec.summed ? ", summed" : ""));
        const Choices choices = RandomChoices(spec);
        const Answer expected = machine(1).Run(Mlp(machine(1), on_one, choices));
        const Answer answer = machine(devices).Run(Mlp(machine(devices), cut, choices));
        ExpectNear(answer, expected, choices.dtype);
        EXPECT_TRUE(machine(devices).Run(Mlp(machine(devices), cut, choices)).bytes == answer.bytes)
            << "the order of the devices does not change";
      }
    }
  }
}

TEST_P(SharedExpertsTest, AnMlpWithoutExpertsIsCutInTheMiddle) {
  const Mixture mixture = RandomMixture({.experts = 1, .middle = 420});
  const PlacedMixture on_one = Placed(machine(1), mixture, false);
  for (size_t devices : {2, 3}) {
    const PlacedMixture cut = Placed(machine(devices), mixture, true);
    for (int64_t rows : {0, 1, 17}) {
      Choices choices = RandomChoices({rows, 1, 1, 64, false, 6});
      choices.of_experts = false;
      choices.ids.clear();
      const Answer answer = machine(devices).Run(Mlp(machine(devices), cut, choices));
      ExpectNear(answer, machine(1).Run(Mlp(machine(1), on_one, choices)), choices.dtype);
      EXPECT_EQ(answer.report.device, devices == 2 ? "cpu:0,cpu:1" : "cpu:0,cpu:1,cpu:2");
    }
  }
}

// The largest number of a token, by which what enters down is rounded, may be on any device.
TEST_P(SharedExpertsTest, TheMiddleIsRoundedByTheScaleOfOneDevice) {
  const Rounding by_token = {.how = ActivationQuantization::kFloat8PerToken};
  for (int64_t experts : {1, 8}) {
    const Mixture mixture = RandomMixture({.experts = experts, .middle = 420});
    for (const auto& [rows, top_k, summed] :
         {std::tuple{0, 2, true}, {1, 1, false}, {7, 3, true}, {5, 2, false}}) {
      Choices choices = RandomChoices({rows, experts == 1 ? 1 : top_k, experts, 64,
                                       summed && experts > 1, static_cast<uint64_t>(rows)});
      if (experts == 1) choices.of_experts = false, choices.ids.clear();
      const auto run = [&](size_t devices, bool cut, bool bias) {
        Machine& on = machine(devices);
        const PlacedMixture placed = Placed(on, mixture, cut);
        GatedMlpWork work({placed.gate, placed.up, placed.down, by_token, by_token, by_token}, {});
        work = Fill(on, choices, std::move(work));
        if (bias) work.gate_up_bias.assign(2 * experts * 420, 0.25f);
        if (bias) work.down_bias.assign(experts * 40, -0.5f);
        return on.Run(std::move(work));
      };
      for (bool bias : {false, true}) {
        SCOPED_TRACE(absl::StrCat(experts, " experts, ", rows, " tokens", bias ? ", bias" : ""));
        const Answer expected = run(1, false, bias);
        for (size_t devices : {2, 3}) {
          const Answer answer = run(devices, true, bias);
          ExpectNear(answer, expected, choices.dtype);
          EXPECT_TRUE(run(devices, true, bias).bytes == answer.bytes);
          EXPECT_EQ(answer.report.device, devices == 2 ? "cpu:0,cpu:1" : "cpu:0,cpu:1,cpu:2");
          EXPECT_EQ(answer.report.kernel, expected.report.kernel);
        }
      }
    }
  }
}

// The down projections alone: sums of parts, then bias, activation and router weights.
TEST_P(SharedExpertsTest, ProductsOfExpertsCutAtRows) {
  const Mixture mixture = RandomMixture({.experts = 4, .middle = 420});
  const PlacedMixture on_one = Placed(machine(1), mixture, false);
  const PlacedMixture cut = Placed(machine(3), mixture, true);
  std::vector<float> bias(4 * 40, 0.5f);
  for (const ChoicesSpec& spec : Cases(4, 420)) {
    const Choices choices = RandomChoices(spec);
    for (bool own_bias : {false, true}) {
      const auto run = [&](Machine& on, const PlacedMixture& mixture_there) {
        GroupedMatmulWork work = Grouped(on, mixture_there.down, choices);
        if (own_bias) work.bias = bias;
        return on.Run(std::move(work));
      };
      ExpectNear(run(machine(3), cut), run(machine(1), on_one), choices.dtype);
    }
  }
}

TEST_P(SharedExpertsTest, AnMlpThatIsNotCutInTheMiddleIsRefused) {
  const Mixture mixture = RandomMixture({.experts = 2, .middle = 420});
  PlacedMixture cut = Placed(machine(2), mixture, true);
  const Choices choices = RandomChoices({2, 1, 2, 64, false, 1});
  cut.down = machine(2).Stack(mixture.down, model::Placing::kColumns);
  Answer answer = machine(2).Run(Mlp(machine(2), cut, choices));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(answer.status.message()),
              HasSubstr("GatedMlp: got a down projection on cpu:0 columns [0, 16), cpu:1 columns"));
  cut = Placed(machine(2), mixture, true);
  cut.up = machine(2).Stack(mixture.up, model::Placing::kWhole);
  answer = machine(2).Run(Mlp(machine(2), cut, choices));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("got up on cpu:0 columns [0, 420)"));
  PlacedMixture spread = Spread(machine(2), mixture);
  spread.up = machine(2).Stack(mixture.up, model::Placing::kWhole);
  answer = machine(2).Run(Mlp(machine(2), spread, choices));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kFailedPrecondition);
}

INSTANTIATE_TEST_SUITE_P(Memory, SharedExpertsTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "shared" : "copied"; });

}  // namespace
}  // namespace awqd::engine
