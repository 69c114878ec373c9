// Works of experts against products in double: sorting, merging, steps, partitioning, refusals.
#include "server/engine/experts_work.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <future>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/cpu/reference.h"
#include "kernels/kernels.h"
#include "server/engine/engine.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kK = 64, kI = 72, kN = 40;

struct Answer {
  absl::Status status;
  std::vector<uint8_t> bytes;
  ExecutionReport report;
};

template <typename AnyWork>
std::future<Answer> SubmitTo(Engine& engine, AnyWork work, const SubmitOptions& options = {}) {
  auto promise = std::make_shared<std::promise<Answer>>();
  auto submitted = engine.Submit(
      std::make_unique<AnyWork>(std::move(work)), options,
      [promise](const absl::Status& status, const Payload& bytes, const ExecutionReport& report) {
        promise->set_value({status, {bytes.view().begin(), bytes.view().end()}, report});
      });
  if (!submitted.ok()) promise->set_value({submitted.status(), {}, {}});
  return promise->get_future();
}

// The tokens of a request, and their experts.
struct Tokens {
  std::vector<float> x;
  int64_t top_k = 1;
  bool of_experts = true, summed = false;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  int64_t rows() const { return static_cast<int64_t>(x.size()) / kK; }
};

Tokens RandomTokens(int64_t rows, int64_t top_k, int64_t experts, bool weighted, uint64_t seed) {
  Tokens out;
  const std::vector<uint8_t> x = testing::RandomMatrix(rows, kK, DType::kFp32, seed);
  for (int64_t i = 0; i < rows * kK; ++i) {
    out.x.push_back(testing::GetElement(x, DType::kFp32, i));
  }
  std::mt19937_64 random(seed);
  out.top_k = top_k;
  out.summed = weighted;
  for (int64_t i = 0; i < rows * top_k; ++i) {
    out.ids.push_back(static_cast<int32_t>(random() % experts));
    if (weighted) out.weights.push_back(static_cast<float>(random() % 1000) / 1000);
  }
  return out;
}

class ExpertsTest : public ::testing::TestWithParam<bool> {
 protected:
  void Start(int64_t experts, EngineOptions options = {}) {
    // The engine of an earlier start is destroyed before its device.
    engine_.reset();
    gate_ = up_ = down_ = nullptr;
    device_ = std::make_unique<testing::WrappedDevice>(*OpenDevice("cpu", {.cpu_threads = 2}),
                                                       GetParam());
    engine_ = *MakeLocalEngine(device_.get(), options);
    Device* const devices[] = {&device_->inner()};
    MakeStacks(experts, devices, false);
  }
  void StartThree(int64_t experts, bool cut) {
    std::vector<std::unique_ptr<Engine>> engines;
    std::vector<Device*> all;
    for (int i = 0; i < 3; ++i) {
      devices_.push_back(*OpenDevice(absl::StrCat("cpu:", i), {.cpu_threads = 1}));
      all.push_back(devices_.back().get());
      engines.push_back(*MakeLocalEngine(all.back(), {}));
    }
    engine_ = MakeRoutingEngine(std::move(engines));
    MakeStacks(experts, all, cut);
  }
  void MakeStacks(int64_t experts, absl::Span<Device* const> devices, bool cut, uint64_t seed = 0) {
    const auto make = [&](int64_t k, int64_t n, uint64_t seed, std::vector<HostWeight>* hosts) {
      hosts->clear();
      std::map<int64_t, std::shared_ptr<const model::PlacedWeight>> placed;
      for (int64_t e = 0; e < experts; ++e) {
        hosts->push_back(testing::RandomWeight(
            {.k = k, .n = n, .scheme = Asymmetric(4, 32), .bias = true, .seed = seed + e}));
        placed.emplace(
            e, *model::PlaceWeight(hosts->back(), devices,
                                   cut ? model::Placing::kColumns : model::Placing::kWhole));
      }
      return *model::MakeStack("experts.*.proj", placed);
    };
    gate_ = make(kK, kI, seed + 100, &hosts_[0]);
    up_ = make(kK, kI, seed + 200, &hosts_[1]);
    down_ = make(kI, kN, seed + 300, &hosts_[2]);
  }

  template <typename Routed>
  void Fill(const Tokens& tokens, Routed* work) {
    work->x = *engine_->staging().Get(static_cast<int64_t>(tokens.x.size()) * 4);
    if (!tokens.x.empty()) std::memcpy(work->x.data(), tokens.x.data(), tokens.x.size() * 4);
    work->x_dtype = work->out_dtype = DType::kFp32;
    work->rows = tokens.rows();
    work->top_k = tokens.top_k;
    work->of_experts = tokens.of_experts;
    work->summed = tokens.summed;
    work->ids = tokens.ids;
    work->router_weights = tokens.weights;
    work->activation = ActivationFunction::kSilu;
  }
  GroupedMatmulWork Grouped(const Tokens& tokens) {
    GroupedMatmulWork work;
    work.stack = gate_;
    Fill(tokens, &work);
    return work;
  }
  GatedMlpWork Mlp(const Tokens& tokens) {
    GatedMlpWork work(gate_, up_, down_);
    Fill(tokens, &work);
    return work;
  }

  // One row of x times one weight, in double.
  static std::vector<double> Row(const HostWeight& weight, const std::vector<float>& x,
                                 ActivationFunction activation) {
    return ReferenceProduct(weight, {.x = {x.data(), DType::kFp32, 1, weight.k},
                                     .bias = weight.bias.data(),
                                     .activation = activation});
  }
  std::vector<double> ExpertRow(int32_t expert, const std::vector<float>& x, bool mlp) const {
    if (!mlp) return Row(hosts_[0][expert], x, ActivationFunction::kSilu);
    return MlpRow(hosts_[0][expert], hosts_[1][expert], hosts_[2][expert], x);
  }
  static std::vector<double> MlpRow(const HostWeight& gate_of, const HostWeight& up_of,
                                    const HostWeight& down_of, const std::vector<float>& x) {
    const std::vector<double> gate = Row(gate_of, x, ActivationFunction::kSilu);
    const std::vector<double> up = Row(up_of, x, ActivationFunction::kNone);
    std::vector<float> middle;
    for (size_t i = 0; i < gate.size(); ++i) middle.push_back(gate[i] * up[i]);
    return Row(down_of, middle, ActivationFunction::kNone);
  }

  void ExpectRight(const Answer& answer, const Tokens& tokens, bool mlp) const {
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    std::vector<double> expected;
    for (int64_t t = 0; t < tokens.rows(); ++t) {
      const std::vector<float> x(tokens.x.begin() + t * kK, tokens.x.begin() + (t + 1) * kK);
      std::vector<double> sum;
      for (int64_t j = 0; j < tokens.top_k; ++j) {
        const int64_t choice = t * tokens.top_k + j;
        const int32_t expert = tokens.ids.empty() ? 0 : tokens.ids[choice];
        const std::vector<double> row = ExpertRow(expert, x, mlp);
        if (tokens.weights.empty()) {
          expected.insert(expected.end(), row.begin(), row.end());
          continue;
        }
        sum.resize(row.size());
        for (size_t n = 0; n < row.size(); ++n) sum[n] += tokens.weights[choice] * row[n];
      }
      expected.insert(expected.end(), sum.begin(), sum.end());
    }
    ASSERT_EQ(answer.bytes.size(), expected.size() * 4);
    if (expected.empty()) return;
    // Kernels multiply by FP16 weights, which are accurate to 2^-12 on average, in three products.
    EXPECT_LE(testing::FrobeniusError(answer.bytes, DType::kFp32, expected), 0x1p-11);
  }

  std::vector<HostWeight> hosts_[3];
  std::unique_ptr<testing::WrappedDevice> device_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::shared_ptr<const model::WeightStack> gate_, up_, down_;
  std::unique_ptr<Engine> engine_;
};

TEST(SortByExpert, KeepsTheOrderOfTheTokens) {
  const ExpertOrder order = SortByExpert({2, 0, 0, 2, 3, 0}, /*top_k=*/2, /*experts=*/5);
  EXPECT_THAT(order.ends, ElementsAre(3, 3, 5, 6, 6));
  EXPECT_THAT(order.tokens, ElementsAre(0, 1, 2, 0, 1, 2));
  EXPECT_THAT(order.rows, ElementsAre(3, 0, 1, 4, 5, 2));
}

TEST_P(ExpertsTest, EveryNumberOfExpertsAndChoices) {
  for (int64_t experts : {1, 2, 8, 64}) {
    for (auto& hosts : hosts_) hosts.clear();
    Start(experts);
    for (const auto& [rows, top_k, weighted] :
         {std::tuple{1, 1, false}, {7, 2, true}, {5, 8, true}, {33, 3, false}, {0, 2, true}}) {
      const Tokens tokens = RandomTokens(rows, top_k, experts, weighted, experts + rows);
      SCOPED_TRACE(absl::StrCat(experts, " experts, ", rows, " tokens, top ", top_k));
      ExpectRight(SubmitTo(*engine_, Grouped(tokens)).get(), tokens, false);
      ExpectRight(SubmitTo(*engine_, Mlp(tokens)).get(), tokens, true);
    }
  }
}

TEST_P(ExpertsTest, AllTokensMayGoToOneExpert) {
  Start(8);
  Tokens tokens = RandomTokens(9, 2, 8, true, 4);
  std::fill(tokens.ids.begin(), tokens.ids.end(), 5);
  const Answer answer = SubmitTo(*engine_, Grouped(tokens)).get();
  ExpectRight(answer, tokens, false);
  EXPECT_EQ(answer.report.batch_tokens, 18);
  ExpectRight(SubmitTo(*engine_, Mlp(tokens)).get(), tokens, true);
}

TEST_P(ExpertsTest, AnMlpWithoutExperts) {
  Start(1);
  for (int64_t rows : {0, 1, 17}) {
    Tokens tokens = RandomTokens(rows, 1, 1, false, 6);
    tokens.of_experts = false;
    tokens.ids.clear();
    ExpectRight(SubmitTo(*engine_, Mlp(tokens)).get(), tokens, true);
  }
}

// The bits of a token do not depend on the tokens that it is merged with.
TEST_P(ExpertsTest, WhatGathersRunsOnce) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Minutes(1);  // the last one fills the batch
  options.batching.max_batch_tokens = 18;
  Start(4, options);
  std::vector<Tokens> requests;
  std::vector<std::future<Answer>> answers;
  for (int64_t rows : {1, 3, 5}) {
    requests.push_back(RandomTokens(rows, 2, 4, true, rows));
    answers.push_back(SubmitTo(*engine_, Mlp(requests.back())));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    const Answer answer = answers[i].get();
    ExpectRight(answer, requests[i], true);
    EXPECT_EQ(answer.report.batch_requests, 3);
    EXPECT_EQ(answer.report.batch_tokens, 18);
  }
  EXPECT_EQ(device_->copies_to_host(), 0) << "a small result is written in place";
}

TEST_P(ExpertsTest, OnlyAlikeRequestsHaveTheSameKey) {
  Start(4);
  const Tokens tokens = RandomTokens(2, 2, 4, true, 1);
  const GroupedMatmulWork like = Grouped(tokens);
  EXPECT_EQ(like.key(), Grouped(tokens).key());
  const auto differs = [&](auto change) {
    GroupedMatmulWork work = Grouped(tokens);
    change(work);
    return !(work.key() == like.key());
  };
  EXPECT_TRUE(differs([&](auto& work) { work.stack = up_; }));
  EXPECT_TRUE(differs([](auto& work) { work.summed = false; }));
  EXPECT_TRUE(differs([](auto& work) { work.of_experts = false; }));
  EXPECT_TRUE(differs([](auto& work) { work.top_k = 1; }));
  EXPECT_TRUE(differs([](auto& work) { work.out_dtype = DType::kFp16; }));
  EXPECT_TRUE(differs([](auto& work) { work.x_dtype = DType::kBf16; }));
  EXPECT_TRUE(differs([](auto& work) { work.path = Path::kFused; }));
  EXPECT_TRUE(differs([](auto& work) { work.activation = ActivationFunction::kNone; }));
  EXPECT_TRUE(differs([](auto& work) { work.bias.resize(4 * kI); }));
  using enum ActivationQuantization;
  EXPECT_TRUE(differs([](auto& work) { work.rounding.how = kFloat8PerToken; }));
  GroupedMatmulWork scaled = Grouped(tokens);
  scaled.rounding = {.how = kFloat8Static, .scales = {1}};
  EXPECT_EQ(scaled.key(), scaled.key());
  EXPECT_NE(scaled.merge_key().subject, nullptr) << "scales of the weights are alike";
  scaled.rounding.from_request = true;
  EXPECT_EQ(scaled.merge_key().subject, nullptr);
  // An MLP may round what enters each of its products.
  std::vector<GatedMlpWork> roundings;
  for (Rounding GatedMlpWork::Stacks::*of :
       {&GatedMlpWork::Stacks::of_gate, &GatedMlpWork::Stacks::of_up,
        &GatedMlpWork::Stacks::of_down}) {
    GatedMlpWork::Stacks stacks = {gate_, up_, down_};
    (stacks.*of).how = kFloat8PerBlock;
    roundings.emplace_back(stacks, GatedMlpWork::Stacks());
    Fill(tokens, &roundings.back());
    EXPECT_FALSE(roundings.back().key() == Mlp(tokens).key());
    EXPECT_FALSE(roundings.back().key() == roundings.front().key() && roundings.size() > 1);
  }
  // So does an MLP with other constants.
  GatedMlpWork clamped = Mlp(tokens);
  clamped.parameters.limit = 7;
  EXPECT_FALSE(clamped.key() == Mlp(tokens).key());
  // An MLP is different although it shares its gate with another.
  GatedMlpWork one(gate_, up_, down_), other(gate_, gate_, down_);
  EXPECT_FALSE(one.key() == other.key());
}

TEST_P(ExpertsTest, ALargeOneRunsInSteps) {
  EngineOptions options;
  options.batching.max_batch_tokens = 8;
  Start(4, options);
  const Tokens tokens = RandomTokens(21, 3, 4, true, 8);
  ExpectRight(SubmitTo(*engine_, Grouped(tokens)).get(), tokens, false);
  ExpectRight(SubmitTo(*engine_, Mlp(tokens)).get(), tokens, true);
}

TEST_P(ExpertsTest, EitherPathAndABiasOfTheRequest) {
  Start(3);
  const Tokens tokens = RandomTokens(6, 2, 3, false, 9);
  for (Path path : {Path::kFused, Path::kDequantize}) {
    GroupedMatmulWork work = Grouped(tokens);
    work.path = path;
    for (HostWeight& host : hosts_[0]) {
      for (float& value : host.bias) value = value + 1;
      work.bias.insert(work.bias.end(), host.bias.begin(), host.bias.end());
    }
    const Answer answer = SubmitTo(*engine_, work).get();
    ExpectRight(answer, tokens, false);
    EXPECT_EQ(answer.report.path, path);
  }
}

// The weights have biases of their own too.
TEST_P(ExpertsTest, BiasesOfTheRequestForEveryProjection) {
  Start(3);
  for (bool of_experts : {true, false}) {
    Tokens tokens = RandomTokens(6, of_experts ? 2 : 1, 3, of_experts, 9);
    if (!of_experts) {
      Start(1);
      tokens.of_experts = false;
      tokens.ids.clear();
    }
    GatedMlpWork work = Mlp(tokens);
    for (int i : {0, 1, 2}) {
      for (HostWeight& host : hosts_[i]) {
        for (float& value : host.bias) value = value / 2 + 1;
        std::vector<float>& to = i == 2 ? work.down_bias : work.gate_up_bias;
        to.insert(to.end(), host.bias.begin(), host.bias.end());
      }
    }
    EXPECT_EQ(work.merge_key().subject, nullptr);
    ExpectRight(SubmitTo(*engine_, std::move(work)).get(), tokens, true);
  }
}

TEST_P(ExpertsTest, ASharedExpertIsAddedToTheSum) {
  Start(4);
  const std::array<std::vector<HostWeight>, 3> experts = {hosts_[0], hosts_[1], hosts_[2]};
  const GatedMlpWork::Stacks routed = {gate_, up_, down_};
  Device* const devices[] = {&device_->inner()};
  MakeStacks(1, devices, false, 1000);
  const GatedMlpWork::Stacks shared = {gate_, up_, down_};
  for (const auto& [rows, gated] : {std::pair(5, false), {5, true}, {0, true}}) {
    const Tokens tokens = RandomTokens(rows, 2, 4, true, 12);
    GatedMlpWork work(routed, shared);
    Fill(tokens, &work);
    if (gated) work.shared_expert_gate.assign(kK, 0.125f);
    const Answer answer = SubmitTo(*engine_, std::move(work)).get();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    std::vector<double> expected;
    for (int64_t t = 0; t < rows; ++t) {
      const std::vector<float> x(tokens.x.begin() + t * kK, tokens.x.begin() + (t + 1) * kK);
      const double sum = std::accumulate(x.begin(), x.end(), 0.0) / 8;
      std::vector<double> row = MlpRow(hosts_[0][0], hosts_[1][0], hosts_[2][0], x);
      for (double& value : row) value *= gated ? 1 / (1 + std::exp(-sum)) : 1;
      for (int64_t j = 2 * t; j < 2 * t + 2; ++j) {
        const int32_t e = tokens.ids[j];
        const std::vector<double> one = MlpRow(experts[0][e], experts[1][e], experts[2][e], x);
        for (size_t n = 0; n < row.size(); ++n) row[n] += tokens.weights[j] * one[n];
      }
      expected.insert(expected.end(), row.begin(), row.end());
    }
    ASSERT_EQ(answer.bytes.size(), expected.size() * 4);
    if (rows > 0) {
      EXPECT_LE(testing::FrobeniusError(answer.bytes, DType::kFp32, expected), 0x1p-11);
    }
  }
}

// Each token is gated by the gate of its own request.
TEST_P(ExpertsTest, RequestsWithSharedExpertsMerge) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Minutes(1);  // the last one fills the batch
  options.batching.max_batch_tokens = 18;
  Start(4, options);
  const GatedMlpWork::Stacks routed = {gate_, up_, down_};
  Device* const devices[] = {&device_->inner()};
  MakeStacks(1, devices, false, 1000);
  const GatedMlpWork::Stacks shared = {gate_, up_, down_};
  const auto make = [&](int64_t rows, float gate) {
    GatedMlpWork work(routed, shared);
    Fill(RandomTokens(rows, 2, 4, true, rows), &work);
    work.shared_expert_gate.assign(kK, gate);
    return work;
  };
  EXPECT_EQ(make(1, 0).key(), make(3, 1).key());
  GatedMlpWork ungated = make(1, 0);
  ungated.shared_expert_gate.clear();
  EXPECT_FALSE(ungated.key() == make(1, 0).key());
  EXPECT_FALSE(GatedMlpWork(routed, {}).key() == GatedMlpWork(routed, shared).key());
  std::vector<std::future<Answer>> together;
  for (const auto& [rows, gate] : {std::pair(1, 0.5f), {3, -0.5f}, {5, -0.5f}}) {
    together.push_back(SubmitTo(*engine_, make(rows, gate)));
  }
  const std::unique_ptr<Engine> alone = *MakeLocalEngine(device_.get(), {});
  for (const auto& [i, rows, gate] : {std::tuple(0, 1, 0.5f), {1, 3, -0.5f}, {2, 5, -0.5f}}) {
    const Answer merged = together[i].get(), one = SubmitTo(*alone, make(rows, gate)).get();
    ASSERT_TRUE(merged.status.ok() && one.status.ok()) << merged.status << one.status;
    EXPECT_EQ(merged.report.batch_requests, 3);
    std::vector<double> expected;
    for (int64_t n = 0; n < rows * kN; ++n) {
      expected.push_back(testing::GetElement(one.bytes, DType::kFp32, n));
    }
    EXPECT_LE(testing::FrobeniusError(merged.bytes, DType::kFp32, expected), 0x1p-11);
  }
}

TEST_P(ExpertsTest, CancelledAndExpiredItNeverRuns) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Hours(1);
  Start(2, options);
  const Tokens tokens = RandomTokens(1, 1, 2, false, 1);
  std::promise<absl::Status> cancelled;
  auto handle = engine_->Submit(std::make_unique<GatedMlpWork>(Mlp(tokens)), {},
                                [&](const absl::Status& status, const Payload&,
                                    const ExecutionReport&) { cancelled.set_value(status); });
  ASSERT_TRUE(handle.ok()) << handle.status();
  handle->Cancel();
  EXPECT_EQ(cancelled.get_future().get().code(), absl::StatusCode::kCancelled);
  const SubmitOptions soon = {.deadline = absl::Now() + absl::Milliseconds(5)};
  EXPECT_EQ(SubmitTo(*engine_, Grouped(tokens), soon).get().status.code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(engine_->queued_tasks(), 0);
}

INSTANTIATE_TEST_SUITE_P(Memory, ExpertsTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "shared" : "copied"; });

class ExpertsOnThree : public ExpertsTest {};

TEST_P(ExpertsOnThree, RunOnAnyReplica) {
  StartThree(4, /*cut=*/false);
  const Tokens tokens = RandomTokens(3, 2, 4, true, 2);
  std::set<std::string> devices;
  for (int i = 0; i < 3; ++i) {
    const Answer answer = SubmitTo(*engine_, Mlp(tokens)).get();
    ExpectRight(answer, tokens, true);
    devices.insert(answer.report.device);
  }
  EXPECT_THAT(devices, ElementsAre("cpu:0", "cpu:1", "cpu:2"));
}

TEST_P(ExpertsOnThree, ProductsAreCutAtTheirColumnsAndMlpsOnlyInTheMiddle) {
  StartThree(4, /*cut=*/true);
  for (bool weighted : {true, false}) {
    const Tokens tokens = RandomTokens(5, 2, 4, weighted, 3);
    GroupedMatmulWork work = Grouped(tokens);
    for (const HostWeight& host : hosts_[0]) {
      work.bias.insert(work.bias.end(), host.bias.begin(), host.bias.end());
    }
    const Answer answer = SubmitTo(*engine_, work).get();
    ExpectRight(answer, tokens, false);
    EXPECT_EQ(answer.report.device, "cpu:0,cpu:1,cpu:2");
  }
  const absl::Status status = SubmitTo(*engine_, Mlp(RandomTokens(1, 1, 4, true, 3))).get().status;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), HasSubstr("GatedMlp: got a down projection on cpu:0 columns [0, "));
}

INSTANTIATE_TEST_SUITE_P(Memory, ExpertsOnThree, ::testing::Values(true),
                         [](const auto&) { return "shared"; });

}  // namespace
}  // namespace awqd::engine
