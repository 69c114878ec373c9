// Requests for experts: every branch of validation, and the jobs that good requests become.
#include "server/wire/experts_wire.h"

#include <functional>
#include <map>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/kernels.h"
#include "server/wire/status.h"
#include "tests/server/requests.h"
#include "tests/testing/random_weight.h"

namespace awqd::wire {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kLimit = 1 << 20;
constexpr int kExperts = 4;

StackPtr Stack(int64_t k, int64_t n, int experts = kExperts) {
  static const std::unique_ptr<Device>* const device =
      new std::unique_ptr<Device>(*OpenDevice("cpu", {.cpu_threads = 1}));
  std::map<int64_t, std::shared_ptr<const model::PlacedWeight>> placed;
  for (int e = 0; e < experts; ++e) {
    placed.emplace(e, model::MakeWhole(*PrepareWeight(
                          testing::RandomWeight({.k = k, .n = n, .seed = 1u + e}), **device)));
  }
  return *model::MakeStack("experts.*.proj", placed);
}

v1::Tensor Ids(std::initializer_list<int64_t> shape, std::initializer_list<int64_t> ids) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::INT32);
  for (int64_t dim : shape) tensor.add_shape(dim);
  for (int64_t id : ids) tensor.mutable_ints()->add_values(id);
  return tensor;
}

// Three tokens with top_k 2.
template <typename Request>
Request Good() {
  Request request;
  *request.mutable_activations() = RawTensor(v1::FP16, {3, 128}, 3 * 128 * 2);
  *request.mutable_expert_ids() = Ids({3, 2}, {3, 0, 1, 1, 2, 0});
  *request.mutable_router_weights() = RawTensor(v1::FP32, {3, 2}, 24);
  return request;
}

v1::GroupedQuantizedMatmulRequest GoodGrouped() {
  auto request = Good<v1::GroupedQuantizedMatmulRequest>();
  request.mutable_weight()->set_model("tiny");
  request.mutable_weight()->set_weight("experts.*.proj");
  return request;
}

v1::GatedMlpRequest GoodMlp() {
  auto request = Good<v1::GatedMlpRequest>();
  request.mutable_mlp()->set_model("tiny");
  request.mutable_mlp()->set_path("experts.*");
  request.set_activation_function(v1::SILU);
  return request;
}

absl::Status Spoilt(const std::function<void(v1::GroupedQuantizedMatmulRequest*)>& spoil) {
  auto request = GoodGrouped();
  spoil(&request);
  absl::Status status = CheckRequest(request);
  if (status.ok()) status = BuildGroupedMatmul(&request, Stack(128, 16), kLimit).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return status;
}

TEST(GroupedMatmul, NamesTheBadField) {
  using R = v1::GroupedQuantizedMatmulRequest;
  const auto field = [](const std::function<void(R*)>& spoil) { return FieldOf(Spoilt(spoil)); };
  EXPECT_EQ(field([](R* r) { r->Clear(); }), "weight");
  EXPECT_EQ(field([](R* r) { r->mutable_weight()->clear_model(); }), "weight.model");
  EXPECT_EQ(field([](R* r) { r->mutable_weight()->clear_weight(); }), "weight.weight");
  EXPECT_EQ(field([](R* r) { r->clear_activations(); }), "activations");
  EXPECT_EQ(field([](R* r) { r->mutable_activations()->set_dtype(v1::INT8); }),
            "activations.dtype");
  EXPECT_EQ(field([](R* r) {
              *r->mutable_activations() = RawTensor(v1::FP16, {3, 64}, 384);
            }),
            "activations.shape");
  EXPECT_EQ(field([](R* r) { r->clear_expert_ids(); }), "expert_ids");
  EXPECT_EQ(field([](R* r) { r->mutable_expert_ids()->set_dtype(v1::FP32); }), "expert_ids.dtype");
  EXPECT_EQ(field([](R* r) {
              *r->mutable_expert_ids() = Ids({2, 2}, {0, 0, 0, 0});
            }),
            "expert_ids.shape");
  EXPECT_EQ(field([](R* r) {
              *r->mutable_expert_ids() = Ids({3}, {0, 0, 0});
            }),
            "expert_ids.shape");
  EXPECT_EQ(field([](R* r) { *r->mutable_expert_ids() = Ids({3, 0}, {}); }), "expert_ids.shape");
  EXPECT_EQ(field([](R* r) { *r->mutable_router_weights() = RawTensor(v1::FP32, {6}, 24); }),
            "router_weights.shape");
  EXPECT_EQ(field([](R* r) { r->mutable_router_weights()->set_dtype(v1::INT32); }),
            "router_weights.dtype");
  EXPECT_EQ(field([](R* r) { *r->mutable_bias() = RawTensor(v1::FP32, {16}, 64); }), "bias.shape");
  EXPECT_EQ(field([](R* r) { r->set_output_dtype(v1::INT32); }), "output_dtype");
  EXPECT_EQ(field([](R* r) { r->set_path(static_cast<v1::Path>(9)); }), "path");
  EXPECT_EQ(field([](R* r) { r->set_request_id(std::string(257, 'x')); }), "request_id");
}

TEST(GroupedMatmul, SaysWhichIdIsOutOfRange) {
  const absl::Status large = Spoilt([](auto* r) {
    *r->mutable_expert_ids() = Ids({3, 2}, {3, 0, 1, 4, 2, 0});
  });
  EXPECT_THAT(large.message(),
              HasSubstr("expert_ids: got 4 at [1, 1], expected 0 to 3: there are 4 experts"));
  const absl::Status negative = Spoilt([](auto* r) {
    *r->mutable_expert_ids() = Ids({3, 2}, {3, 0, 1, 2, -1, 0});
  });
  EXPECT_THAT(negative.message(), HasSubstr("expert_ids: got -1 at [2, 0]"));
  const absl::Status shape = Spoilt([](auto* r) { *r->mutable_expert_ids() = Ids({1}, {0}); });
  EXPECT_THAT(shape.message(), HasSubstr("got [1], expected [3, top_k], leading dimensions"));
}

TEST(GroupedMatmul, BecomesAWork) {
  auto request = GoodGrouped();
  request.set_output_dtype(v1::FP32);
  request.set_activation_function(v1::GELU);
  *request.mutable_bias() = RawTensor(v1::BF16, {kExperts, 16}, kExperts * 32);
  ASSERT_TRUE(CheckRequest(request).ok());
  const auto job = BuildGroupedMatmul(&request, Stack(128, 16), kLimit);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->work.rows, 3);
  EXPECT_EQ(job->work.top_k, 2);
  EXPECT_EQ(job->work.tokens(), 6);
  EXPECT_THAT(job->work.ids, ElementsAre(3, 0, 1, 1, 2, 0));
  EXPECT_EQ(job->work.router_weights.size(), 6u);
  EXPECT_EQ(job->work.bias.size(), kExperts * 16u);
  EXPECT_EQ(job->work.activation, ActivationFunction::kGelu);
  EXPECT_THAT(job->answer.shape, ElementsAre(3, 16));
  EXPECT_EQ(job->answer.bytes, job->work.result_bytes());
  EXPECT_EQ(job->inputs[0].bytes.size(), 3u * 128 * 2);
}

TEST(GroupedMatmul, WithoutRouterWeightsEveryChoiceIsARow) {
  auto request = GoodGrouped();
  request.clear_router_weights();
  *request.mutable_activations() = RawTensor(v1::FP16, {1, 3, 128}, 3 * 128 * 2);
  *request.mutable_expert_ids() = Ids({1, 3, 2}, {3, 0, 1, 1, 2, 0});
  ASSERT_TRUE(CheckRequest(request).ok());
  const auto job = BuildGroupedMatmul(&request, Stack(128, 16), kLimit);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_THAT(job->answer.shape, ElementsAre(1, 3, 2, 16));
  EXPECT_EQ(job->answer.bytes, 3 * 2 * 16 * 2);
  EXPECT_EQ(job->work.result_bytes(), job->answer.bytes);
}

TEST(GroupedMatmul, AnAnswerThatCannotBeSentIsRefused) {
  auto request = GoodGrouped();
  request.clear_router_weights();
  const absl::Status status = BuildGroupedMatmul(&request, Stack(128, 16), 1024 + 100).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
}

absl::Status SpoiltMlp(const std::function<void(v1::GatedMlpRequest*, MlpStacks*)>& spoil) {
  auto request = GoodMlp();
  MlpStacks stacks = {Stack(128, 48), Stack(128, 48), Stack(48, 16), true};
  spoil(&request, &stacks);
  absl::Status status = CheckRequest(request);
  if (status.ok()) status = BuildGatedMlp(&request, stacks, kLimit).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return status;
}

TEST(GatedMlp, NamesTheBadField) {
  using R = v1::GatedMlpRequest;
  const auto field = [](const std::function<void(R*, MlpStacks*)>& spoil) {
    return FieldOf(SpoiltMlp(spoil));
  };
  EXPECT_EQ(field([](R* r, auto*) { r->Clear(); }), "mlp");
  EXPECT_EQ(field([](R* r, auto*) { r->mutable_mlp()->clear_model(); }), "mlp.model");
  EXPECT_EQ(field([](R* r, auto*) {
              r->mutable_mlp()->clear_path();
              r->mutable_mlp()->set_gate("gate");
            }),
            "mlp.up");
  EXPECT_EQ(field([](R* r, auto*) { r->clear_activation_function(); }), "activation_function");
  EXPECT_EQ(field([](R* r, auto*) {
              r->clear_expert_ids();
              r->clear_router_weights();
            }),
            "expert_ids");
  EXPECT_EQ(field([](R* r, auto*) { r->clear_expert_ids(); }), "router_weights");
  EXPECT_EQ(field([](R*, auto* stacks) {
              *stacks = {Stack(128, 48, 1), Stack(128, 48, 1), Stack(48, 16, 1), false};
            }),
            "expert_ids");
  EXPECT_EQ(field([](R*, auto* stacks) { stacks->up = Stack(128, 40); }), "mlp.up");
  EXPECT_EQ(field([](R*, auto* stacks) { stacks->up = Stack(128, 48, 3); }), "mlp.up");
  EXPECT_EQ(field([](R*, auto* stacks) { stacks->down = Stack(40, 16); }), "mlp.down");
  EXPECT_EQ(field([](R*, auto* stacks) { stacks->gate = stacks->up = Stack(64, 48); }),
            "activations.shape");
}

TEST(GatedMlp, BecomesAWorkWithAndWithoutExperts) {
  auto request = GoodMlp();
  ASSERT_TRUE(CheckRequest(request).ok());
  const auto job =
      BuildGatedMlp(&request, {Stack(128, 48), Stack(128, 48), Stack(48, 16), true}, kLimit);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_THAT(job->answer.shape, ElementsAre(3, 16));
  EXPECT_EQ(job->work.tokens(), 6);
  EXPECT_EQ(job->work.result_bytes(), job->answer.bytes);

  auto dense = GoodMlp();
  dense.clear_expert_ids();
  dense.clear_router_weights();
  ASSERT_TRUE(CheckRequest(dense).ok());
  const auto dense_job = BuildGatedMlp(
      &dense, {Stack(128, 48, 1), Stack(128, 48, 1), Stack(48, 16, 1), false}, kLimit);
  ASSERT_TRUE(dense_job.ok()) << dense_job.status();
  EXPECT_EQ(dense_job->work.tokens(), 3);
  EXPECT_TRUE(dense_job->work.ids.empty());
}

TEST(PackedStack, CountsAllItsWeightsAndNamesTheBadOne) {
  v1::PackedStack packed;
  EXPECT_EQ(FieldOf(CheckPacked(packed, kLimit)), "packed.experts");
  for (int i = 0; i < 3; ++i) *packed.add_experts() = GoodPacked();
  const int64_t each = 128 * 2 * 4 + 8 + 32;
  EXPECT_TRUE(CheckPacked(packed, 3 * each).ok());
  const absl::Status large = CheckPacked(packed, 3 * each - 1);
  EXPECT_TRUE(absl::IsResourceExhausted(large)) << large;
  EXPECT_THAT(large.message(), HasSubstr(absl::StrCat("got ", 3 * each, " bytes")));
  EXPECT_EQ(DecodePacked(packed, "packed")->size(), 3u);
  packed.mutable_experts(1)->set_format("no such");
  EXPECT_EQ(FieldOf(CheckPacked(packed, kLimit)), "packed.experts[1].format");
  packed.mutable_experts(1)->clear_format();
  packed.mutable_experts(2)->set_group_size(77);
  const absl::Status bad = DecodePacked(packed, "packed.up").status();
  EXPECT_THAT(FieldOf(bad), HasSubstr("packed.up.experts[2]"));
  EXPECT_THAT(bad.message(), HasSubstr("packed.up.experts[2]"));
}

TEST(PackedGatedMlp, ItsThreeStacksShareTheLimit) {
  v1::PackedGatedMlp packed;
  EXPECT_EQ(FieldOf(CheckPacked(packed, kLimit)), "packed.gate.experts");
  *packed.mutable_gate()->add_experts() = GoodPacked();
  *packed.mutable_up()->add_experts() = GoodPacked();
  EXPECT_EQ(FieldOf(CheckPacked(packed, kLimit)), "packed.down.experts");
  *packed.mutable_down()->add_experts() = GoodPacked();
  const int64_t each = 128 * 2 * 4 + 8 + 32;
  EXPECT_TRUE(CheckPacked(packed, 3 * each).ok());
  EXPECT_EQ(FieldOf(CheckPacked(packed, 3 * each - 1)), "packed.down.experts[0]");
}

}  // namespace
}  // namespace awqd::wire
