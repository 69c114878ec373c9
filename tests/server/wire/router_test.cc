// Choices of experts: scores, ties, groups, correction bias, normalisation.
#include "server/wire/router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace awqd::wire {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatNear;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

MATCHER_P(IsNear, values, "") {
  if (arg.size() != values.size()) return false;
  for (size_t i = 0; i < arg.size(); ++i) {
    if (std::abs(arg[i] - values[i]) > 1e-6 * std::abs(values[i])) return false;
  }
  return true;
}

TEST(Router, SoftmaxIsOverAllExperts) {
  const RoutedChoices got = ChooseExperts({.experts = 4, .top_k = 2}, {0, 2, 1, -1});
  EXPECT_THAT(got.ids, ElementsAre(1, 2));
  const double sum = std::exp(0.0) + std::exp(2.0) + std::exp(1.0) + std::exp(-1.0);
  EXPECT_THAT(got.weights, IsNear(std::vector<double>{std::exp(2.0) / sum, std::exp(1.0) / sum}));
}

TEST(Router, NormalisedSoftmaxIsThatOfTheChosen) {
  const RoutedChoices got =
      ChooseExperts({.experts = 4, .top_k = 2, .norm_topk_prob = true}, {0, 2, 1, -1});
  EXPECT_THAT(got.weights,
              IsNear(std::vector<double>{1 / (1 + std::exp(-1.0)), 1 / (1 + std::exp(1.0))}));
}

TEST(Router, LargeLogitsDoNotOverflow) {
  for (RouterScoring scoring :
       {RouterScoring::kSoftmax, RouterScoring::kSigmoid, RouterScoring::kSqrtSoftplus}) {
    const RoutedChoices got =
        ChooseExperts({.scoring = scoring, .experts = 3, .top_k = 1}, {-1e30f, 200, -200});
    EXPECT_THAT(got.ids, ElementsAre(1));
    const float want = scoring == RouterScoring::kSqrtSoftplus ? std::sqrt(200.0f) : 1.0f;
    EXPECT_THAT(got.weights, ElementsAre(FloatNear(want, 1e-6f)));
  }
}

TEST(Router, EachTokenChoosesForItself) {
  const RoutedChoices got = ChooseExperts(
      {.scoring = RouterScoring::kSigmoid, .experts = 2, .top_k = 1, .routed_scaling_factor = 2},
      {0, 1, 3, 2, 5, 5});
  EXPECT_THAT(got.ids, ElementsAre(1, 0, 0));  // the lower number of equal ones
  EXPECT_THAT(got.weights,
              IsNear(std::vector<double>{2 / (1 + std::exp(-1.0)), 2 / (1 + std::exp(-3.0)),
                                         2 / (1 + std::exp(-5.0))}));
}

TEST(Router, TheCorrectionBiasChoosesAndDoesNotWeigh) {
  const RoutedChoices got = ChooseExperts(
      {.scoring = RouterScoring::kSigmoid, .experts = 3, .top_k = 2, .correction_bias = {0, 1, 0}},
      {2, -2, 1});
  EXPECT_THAT(got.ids, ElementsAre(1, 0));
  EXPECT_THAT(got.weights,
              IsNear(std::vector<double>{1 / (1 + std::exp(2.0)), 1 / (1 + std::exp(-2.0))}));
}

// Groups {5, -9}, {3, 3}, {4, -1}: by the largest expert the first and the last stay, by the sum of
// two the last two.
TEST(Router, GroupsStayByOneExpertOrByTwo) {
  Router router = {
      .scoring = RouterScoring::kSigmoid, .experts = 6, .top_k = 3, .n_group = 3, .topk_group = 2};
  const std::vector<float> logits = {5, -9, 3, 3, 4, -1};
  EXPECT_THAT(ChooseExperts(router, logits).ids, ElementsAre(0, 4, 5));
  router.correction_bias = std::vector<float>(6);
  EXPECT_THAT(ChooseExperts(router, logits).ids, ElementsAre(4, 2, 3));
}

TEST(Router, NanIsChosenAndSeen) {
  const RoutedChoices got =
      ChooseExperts({.scoring = RouterScoring::kSigmoid, .experts = 3, .top_k = 2}, {1, kNan, 2});
  EXPECT_THAT(got.ids, ElementsAre(1, 2));
  EXPECT_TRUE(std::isnan(got.weights[0]));
}

TEST(Router, NoTokensHaveNoChoices) {
  EXPECT_TRUE(ChooseExperts({.experts = 4, .top_k = 2}, {}).ids.empty());
}

}  // namespace
}  // namespace awqd::wire
