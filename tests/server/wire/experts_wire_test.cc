// Requests for experts: every branch of validation, and the jobs that good requests become.
#include "server/wire/experts_wire.h"

#include <functional>
#include <limits>
#include <map>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/kernels.h"
#include "server/wire/status.h"
#include "tests/server/requests.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"

namespace awqd::wire {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kMostExpertBytes = 1 << 20;
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
  if (status.ok()) status = BuildGroupedMatmul(&request, Stack(128, 16), kMostExpertBytes).status();
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
  EXPECT_EQ(field([](R* r) { r->set_activation_function(v1::SITU); }), "activation_function");
  EXPECT_EQ(field([](R* r) { r->set_path(static_cast<v1::Path>(9)); }), "path");
  EXPECT_EQ(field([](R* r) { r->set_request_id(std::string(257, 'x')); }), "request_id");
  EXPECT_EQ(field([](R* r) { r->set_activation_quantization(v1::INT8_PER_TOKEN); }),
            "activation_quantization");
  EXPECT_EQ(field([](R* r) { r->set_activation_quantization(v1::FP8_STATIC); }),
            "activation_scales");
  EXPECT_EQ(field([](R* r) {
              r->set_activation_quantization(v1::FP8_STATIC);
              *r->mutable_activation_scales() = RawTensor(v1::FP32, {3}, 12);
            }),
            "activation_scales.shape");
  EXPECT_EQ(field([](R* r) {
              r->set_activation_quantization(v1::FP8_STATIC);
              *r->mutable_activation_scales() = RawTensor(v1::FP32, {1}, 4);
            }),
            "activation_scales")
      << "zero";
}

TEST(GroupedMatmul, RoundsActivations) {
  auto request = GoodGrouped();
  request.set_activation_quantization(v1::FP8_STATIC);
  v1::Tensor* const scales = request.mutable_activation_scales();
  scales->set_dtype(v1::FP32);
  scales->add_shape(kExperts);
  for (int e = 0; e < kExperts; ++e) scales->mutable_floats()->add_values(1 + e);
  ASSERT_TRUE(CheckRequest(request).ok());
  const auto job = BuildGroupedMatmul(&request, Stack(128, 16), kMostExpertBytes);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->work.rounding.how, ActivationQuantization::kFloat8Static);
  EXPECT_TRUE(job->work.rounding.from_request);
  EXPECT_EQ(job->work.rounding.scales, (std::vector<float>{1, 2, 3, 4}));
}

// E4M3 activations with scales of tokens, of blocks of 128, or one for all.
template <typename Request>
Request WithE4m3(Request request, const std::vector<int64_t>& scales) {
  *request.mutable_activations() = RawTensor(v1::FP8_E4M3, {3, 200}, 600);
  v1::Tensor* const tensor = request.mutable_activation_scales();
  tensor->set_dtype(v1::FP32);
  tensor->mutable_shape()->Add(scales.begin(), scales.end());
  int count = 1;
  for (int64_t size : scales) count *= static_cast<int>(size);
  tensor->mutable_floats()->mutable_values()->Resize(count, 0.5f);
  return request;
}

TEST(GroupedMatmul, TakesE4m3WithScalesOfTokensOrBlocks) {
  using enum ActivationQuantization;
  for (const auto& [shape, how] : {std::pair(std::vector<int64_t>{3}, kFloat8Static),
                                   {{3, 2}, kFloat8PerBlock},
                                   {{1}, kFloat8Static}}) {
    auto request = WithE4m3(GoodGrouped(), shape);
    ASSERT_THAT(CheckRequest(request), awqd::testing::IsOk());
    const auto job = BuildGroupedMatmul(&request, Stack(200, 16), kMostExpertBytes);
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(job->work.rounding.how, how);
    EXPECT_EQ(job->work.token_scales, std::vector<float>(how == kFloat8PerBlock ? 6 : 3, 0.5f));
    EXPECT_EQ(job->work.x_dtype, DType::kE4m3);
    EXPECT_EQ(job->work.out_dtype, DType::kFp16);
    EXPECT_NE(job->work.merge_key().subject, nullptr) << "requests with other scales merge";
  }
  auto request = WithE4m3(GoodGrouped(), {kExperts});
  ASSERT_THAT(CheckRequest(request), awqd::testing::IsOk());
  EXPECT_THAT(BuildGroupedMatmul(&request, Stack(200, 16), kMostExpertBytes).status().message(),
              HasSubstr("activation_scales.shape: got [4], expected [3], the leading dimensions"));
  request.clear_activation_scales();
  EXPECT_THAT(CheckRequest(request).message(),
              HasSubstr("activation_scales: got nothing, expected the scales of FP8_E4M3"));
  request = WithE4m3(GoodGrouped(), {3});
  request.set_activation_quantization(v1::FP8_PER_TOKEN);
  EXPECT_THAT(CheckRequest(request).message(),
              HasSubstr("got FP8_PER_TOKEN, expected ACTIVATIONS_AS_SENT"));
}

// The quantisation is then that of what enters down.
TEST(GatedMlp, TakesE4m3) {
  using enum ActivationQuantization;
  for (const auto& [asked, middle] : {std::pair(v1::ACTIVATIONS_AS_SENT, kNone),
                                      {v1::FP8_PER_TOKEN, kFloat8PerToken},
                                      {v1::FP8_STATIC, kFloat8Static}}) {
    auto request = WithE4m3(GoodMlp(), {3, 2});
    request.set_activation_quantization(asked);
    if (asked == v1::FP8_STATIC) {
      EXPECT_EQ(FieldOf(CheckRequest(request)), "down_activation_scales");
      *request.mutable_down_activation_scales() = request.activation_scales();
      request.mutable_down_activation_scales()->clear_shape();
      request.mutable_down_activation_scales()->add_shape(1);
      request.mutable_down_activation_scales()->mutable_floats()->mutable_values()->Resize(1, 1);
    }
    ASSERT_THAT(CheckRequest(request), awqd::testing::IsOk());
    MlpStacks stacks = {Stack(200, 48), Stack(200, 48), Stack(48, 16), true};
    auto job = BuildGatedMlp(&request, stacks, kMostExpertBytes);
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(job->work.token_scales.size(), 6u);
    const engine::Rounding in = {kFloat8PerBlock}, down = {middle};
    engine::GatedMlpWork same({stacks.gate, stacks.up, stacks.down, in, in, down},
                              {nullptr, nullptr, nullptr, in, in, down});
    static_cast<engine::RoutedWork&>(same) = job->work;
    EXPECT_EQ(job->work.key() == same.key(), asked != v1::FP8_STATIC)
        << "given scales do not merge";
  }
  auto request = WithE4m3(GoodMlp(), {3});
  request.clear_activation_scales();
  EXPECT_EQ(FieldOf(CheckRequest(request)), "activation_scales");
  request = WithE4m3(GoodMlp(), {3});
  request.set_activation_quantization(v1::INT8_PER_TOKEN);
  EXPECT_EQ(FieldOf(CheckRequest(request)), "activation_quantization");
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
  const auto job = BuildGroupedMatmul(&request, Stack(128, 16), kMostExpertBytes);
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
  const auto job = BuildGroupedMatmul(&request, Stack(128, 16), kMostExpertBytes);
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
  if (status.ok()) status = BuildGatedMlp(&request, stacks, kMostExpertBytes).status();
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
  const auto job = BuildGatedMlp(&request, {Stack(128, 48), Stack(128, 48), Stack(48, 16), true},
                                 kMostExpertBytes);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_THAT(job->answer.shape, ElementsAre(3, 16));
  EXPECT_EQ(job->work.tokens(), 6);
  EXPECT_EQ(job->work.result_bytes(), job->answer.bytes);

  auto dense = GoodMlp();
  dense.clear_expert_ids();
  dense.clear_router_weights();
  ASSERT_TRUE(CheckRequest(dense).ok());
  const auto dense_job = BuildGatedMlp(
      &dense, {Stack(128, 48, 1), Stack(128, 48, 1), Stack(48, 16, 1), false}, kMostExpertBytes);
  ASSERT_TRUE(dense_job.ok()) << dense_job.status();
  EXPECT_EQ(dense_job->work.tokens(), 3);
  EXPECT_TRUE(dense_job->work.ids.empty());
}

GateParameters ParametersOf(v1::ActivationFunction function,
                            const std::function<void(v1::ActivationParameters*)>& set) {
  auto request = GoodMlp();
  request.set_activation_function(function);
  set(request.mutable_activation_parameters());
  EXPECT_TRUE(CheckRequest(request).ok());
  const auto job = BuildGatedMlp(&request, {Stack(128, 48), Stack(128, 48), Stack(48, 16), true},
                                 kMostExpertBytes);
  EXPECT_TRUE(job.ok()) << job.status();
  return job->work.parameters;
}

TEST(GatedMlp, ConstantsHaveTheDefaultsOfTheFunction) {
  const auto none = [](auto*) {};
  EXPECT_EQ(ParametersOf(v1::SILU, none), GateParameters());
  EXPECT_EQ(ParametersOf(v1::SWIGLU_OAI, none), (GateParameters{.limit = 7, .alpha = 1.702f}));
  EXPECT_EQ(ParametersOf(v1::SITU, none), (GateParameters{.beta = 4, .linear_beta = 25}));
  EXPECT_EQ(ParametersOf(v1::GELU_TANH, [](auto* p) { p->set_limit(10); }).limit, 10);
  EXPECT_EQ(ParametersOf(v1::SWIGLU_OAI, [](auto* p) { p->set_alpha(1.5f); }),
            (GateParameters{.limit = 7, .alpha = 1.5f}));
  EXPECT_EQ(ParametersOf(v1::SITU, [](auto* p) { p->set_linear_beta(0); }),
            (GateParameters{.beta = 4}));
}

TEST(GatedMlp, RefusesConstantsThatTheFunctionHasNot) {
  const auto refused = [](v1::ActivationFunction function,
                          const std::function<void(v1::ActivationParameters*)>& set) {
    return std::string(SpoiltMlp([&](auto* r, auto*) {
                         r->set_activation_function(function);
                         set(r->mutable_activation_parameters());
                       }).message());
  };
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(refused(v1::SILU, [](auto* p) { p->set_alpha(1); }),
            "activation_parameters.alpha: got 1, expected none: SILU has no such constant");
  EXPECT_THAT(refused(v1::SWIGLU_OAI, [](auto* p) { p->set_beta(1); }), HasSubstr("beta: got 1"));
  EXPECT_THAT(refused(v1::SITU, [](auto* p) { p->set_limit(1); }), HasSubstr("limit: got 1"));
  EXPECT_THAT(refused(v1::SILU, [](auto* p) { p->set_limit(0); }),
              HasSubstr("limit: got 0, expected a finite number above 0"));
  EXPECT_THAT(refused(v1::SILU, [&](auto* p) { p->set_limit(infinity); }), HasSubstr("got inf"));
  EXPECT_THAT(refused(v1::SITU, [](auto* p) { p->set_linear_beta(-1); }),
              HasSubstr("linear_beta: got -1, expected a finite number of at least 0"));
}

// Three tokens, four experts.
v1::Router GoodRouter() {
  v1::Router out;
  v1::Tensor& logits = *out.mutable_logits();
  logits.set_dtype(v1::FP32);
  for (int64_t dim : {3, kExperts}) logits.add_shape(dim);
  for (float value : {0, 3, 1, 2, 9, 8, 7, 6, 1, 1, 1, 2}) {
    logits.mutable_floats()->add_values(value);
  }
  out.set_top_k(2);
  return out;
}

TEST(Router, ChoosesExpertsAndSumsTheirRows) {
  auto request = GoodGrouped();
  request.clear_expert_ids();
  request.clear_router_weights();
  *request.mutable_router() = GoodRouter();
  request.mutable_router()->set_scoring(v1::SIGMOID);
  request.mutable_router()->set_norm_topk_prob(true);
  request.mutable_router()->set_routed_scaling_factor(2);
  ASSERT_TRUE(CheckRequest(request).ok()) << CheckRequest(request);
  const auto job = BuildGroupedMatmul(&request, Stack(128, 16), kMostExpertBytes);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_THAT(job->work.ids, ElementsAre(1, 3, 0, 1, 3, 0));
  EXPECT_TRUE(job->work.of_experts && job->work.summed);
  ASSERT_EQ(job->work.router_weights.size(), 6u);
  for (int token : {0, 1, 2}) {
    EXPECT_NEAR(job->work.router_weights[2 * token] + job->work.router_weights[2 * token + 1], 2,
                1e-6);
  }
  EXPECT_THAT(job->answer.shape, ElementsAre(3, 16));
}

TEST(Router, NamesTheBadField) {
  using R = v1::Router;
  const auto refused = [](const std::function<void(R*)>& spoil) {
    return std::string(Spoilt([&](auto* r) {
                         r->clear_expert_ids();
                         r->clear_router_weights();
                         *r->mutable_router() = GoodRouter();
                         spoil(r->mutable_router());
                       }).message());
  };
  EXPECT_EQ(refused([](R* r) { r->clear_logits(); }),
            "router.logits: got nothing, expected a tensor of shape [..., experts]");
  EXPECT_THAT(refused([](R* r) { r->mutable_logits()->set_dtype(v1::INT32); }),
              HasSubstr("router.logits.dtype"));
  EXPECT_THAT(refused([](R* r) { *r->mutable_logits() = RawTensor(v1::FP32, {4}, 16); }),
              HasSubstr("router.logits.shape: got [4], expected [3] and experts"));
  EXPECT_THAT(refused([](R* r) {
                *r->mutable_logits() = RawTensor(v1::FP32, {3, 5}, 60);
              }),
              HasSubstr("router.logits.shape: got [3, 5], expected [3, 4]: there are 4 experts"));
  EXPECT_THAT(refused([](R* r) { *r->mutable_correction_bias() = RawTensor(v1::FP32, {3}, 12); }),
              HasSubstr("router.correction_bias.shape: got [3], expected [4]"));
  EXPECT_THAT(refused([](R* r) { r->set_top_k(0); }),
              HasSubstr("router.top_k: got 0, expected 1 to 4"));
  EXPECT_THAT(refused([](R* r) { r->set_top_k(5); }), HasSubstr("router.top_k: got 5"));
  EXPECT_THAT(refused([](R* r) { r->set_scoring(static_cast<v1::RouterScoring>(9)); }),
              HasSubstr("router.scoring"));
  EXPECT_THAT(refused([](R* r) { r->set_topk_group(1); }),
              HasSubstr("router.n_group: got 0, expected 1 to 4"));
  EXPECT_THAT(refused([](R* r) {
                r->set_n_group(3);
                r->set_topk_group(1);
              }),
              HasSubstr("router.n_group: got 3, expected a divisor of 4"));
  EXPECT_THAT(refused([](R* r) {
                r->set_n_group(2);
                r->set_topk_group(3);
              }),
              HasSubstr("router.topk_group: got 3, expected 1 to 2"));
  EXPECT_THAT(refused([](R* r) {
                r->set_n_group(4);
                r->set_topk_group(1);
              }),
              HasSubstr("router.top_k: got 2, expected 1 to 1"));
  EXPECT_THAT(
      refused([](R* r) { r->set_routed_scaling_factor(std::numeric_limits<float>::infinity()); }),
      HasSubstr("router.routed_scaling_factor: got inf"));
  EXPECT_EQ(FieldOf(Spoilt([](auto* r) { *r->mutable_router() = GoodRouter(); })), "expert_ids");
  EXPECT_EQ(FieldOf(SpoiltMlp([](auto* r, auto* stacks) {
              r->clear_expert_ids();
              r->clear_router_weights();
              *r->mutable_router() = GoodRouter();
              *stacks = {Stack(128, 48, 1), Stack(128, 48, 1), Stack(48, 16, 1), false};
            })),
            "router");
}

TEST(GatedMlp, BiasesAndASharedExpertOfTheRequest) {
  auto request = GoodMlp();
  *request.mutable_gate_bias() = RawTensor(v1::FP16, {kExperts, 48}, kExperts * 48 * 2);
  *request.mutable_up_bias() = RawTensor(v1::BF16, {kExperts, 48}, kExperts * 48 * 2);
  *request.mutable_down_bias() = RawTensor(v1::FP32, {kExperts, 16}, kExperts * 16 * 4);
  *request.mutable_shared_expert_gate() = RawTensor(v1::FP16, {128}, 256);
  request.mutable_mlp()->set_shared_expert("shared");
  ASSERT_TRUE(CheckRequest(request).ok()) << CheckRequest(request);
  const auto job = BuildGatedMlp(&request,
                                 {Stack(128, 48),
                                  Stack(128, 48),
                                  Stack(48, 16),
                                  true,
                                  {Stack(128, 32, 1), Stack(128, 32, 1), Stack(32, 16, 1)}},
                                 kMostExpertBytes);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->work.gate_up_bias.size(), 2u * kExperts * 48);
  EXPECT_EQ(job->work.down_bias.size(), kExperts * 16u);
  EXPECT_EQ(job->work.shared_expert_gate.size(), 128u);
  EXPECT_EQ(job->work.weights().size(), 6u);
}

TEST(GatedMlp, NamesTheBadBiasAndSharedExpert) {
  using R = v1::GatedMlpRequest;
  const auto field = [](const std::function<void(R*, MlpStacks*)>& spoil) {
    return FieldOf(SpoiltMlp(spoil));
  };
  EXPECT_EQ(field([](R* r, auto*) { *r->mutable_gate_bias() = RawTensor(v1::FP32, {48}, 192); }),
            "up_bias");
  EXPECT_EQ(field([](R* r, auto*) {
              *r->mutable_gate_bias() = *r->mutable_up_bias() = RawTensor(v1::FP32, {48}, 192);
            }),
            "gate_bias.shape");
  EXPECT_EQ(field([](R* r, auto*) { *r->mutable_down_bias() = RawTensor(v1::FP32, {16}, 64); }),
            "down_bias.shape");
  EXPECT_EQ(field([](R* r, auto*) { r->mutable_mlp()->set_shared_expert(std::string(1025, 'x')); }),
            "mlp.shared_expert");
  EXPECT_EQ(field([](R* r, auto*) {
              r->mutable_mlp()->set_shared_expert("shared");
              r->clear_router_weights();
            }),
            "mlp.shared_expert");
  EXPECT_EQ(field([](R* r, auto*) {
              *r->mutable_shared_expert_gate() = RawTensor(v1::FP16, {128}, 256);
            }),
            "shared_expert_gate");
  const auto with_shared = [&](int64_t k, int64_t n) {
    return field([=](R* r, auto* stacks) {
      r->mutable_mlp()->set_shared_expert("shared");
      *r->mutable_shared_expert_gate() = RawTensor(v1::FP16, {64}, 128);
      stacks->shared = {Stack(k, 32, 1), Stack(k, 32, 1), Stack(32, n, 1)};
    });
  };
  EXPECT_EQ(with_shared(64, 16), "mlp.shared_expert.gate");
  EXPECT_EQ(with_shared(128, 8), "mlp.shared_expert.down");
  EXPECT_EQ(with_shared(128, 16), "shared_expert_gate.shape");
}

TEST(PackedStack, CountsAllItsWeightsAndNamesTheBadOne) {
  v1::PackedStack packed;
  EXPECT_EQ(FieldOf(CheckPacked(packed, kMostExpertBytes)), "packed.experts");
  for (int i = 0; i < 3; ++i) *packed.add_experts() = GoodPacked();
  const int64_t each = 128 * 2 * 4 + 8 + 32;
  EXPECT_TRUE(CheckPacked(packed, 3 * each).ok());
  const absl::Status large = CheckPacked(packed, 3 * each - 1);
  EXPECT_TRUE(absl::IsResourceExhausted(large)) << large;
  EXPECT_THAT(large.message(), HasSubstr(absl::StrCat("got ", 3 * each, " bytes")));
  EXPECT_EQ(DecodePacked(packed, "packed")->size(), 3u);
  packed.mutable_experts(1)->set_format("no such");
  EXPECT_EQ(FieldOf(CheckPacked(packed, kMostExpertBytes)), "packed.experts[1].format");
  packed.mutable_experts(1)->clear_format();
  packed.mutable_experts(2)->set_group_size(77);
  const absl::Status bad = DecodePacked(packed, "packed.up").status();
  EXPECT_THAT(FieldOf(bad), HasSubstr("packed.up.experts[2]"));
  EXPECT_THAT(bad.message(), HasSubstr("packed.up.experts[2]"));
}

TEST(PackedGatedMlp, ItsThreeStacksShareTheLimit) {
  v1::PackedGatedMlp packed;
  EXPECT_EQ(FieldOf(CheckPacked(packed, kMostExpertBytes)), "packed.gate.experts");
  *packed.mutable_gate()->add_experts() = GoodPacked();
  *packed.mutable_up()->add_experts() = GoodPacked();
  EXPECT_EQ(FieldOf(CheckPacked(packed, kMostExpertBytes)), "packed.down.experts");
  *packed.mutable_down()->add_experts() = GoodPacked();
  const int64_t each = 128 * 2 * 4 + 8 + 32;
  EXPECT_TRUE(CheckPacked(packed, 3 * each).ok());
  EXPECT_EQ(FieldOf(CheckPacked(packed, 3 * each - 1)), "packed.down.experts[0]");
  v1::PackedGatedMlp with_shared = packed;
  *with_shared.mutable_shared_expert() = packed;
  EXPECT_TRUE(CheckPacked(with_shared, 6 * each).ok());
  EXPECT_EQ(FieldOf(CheckPacked(with_shared, 6 * each - 1)),
            "packed.shared_expert.down.experts[0]");
  with_shared.mutable_shared_expert()->mutable_shared_expert();
  EXPECT_EQ(FieldOf(CheckPacked(with_shared, 6 * each)), "packed.shared_expert.shared_expert");
}

}  // namespace
}  // namespace awqd::wire
