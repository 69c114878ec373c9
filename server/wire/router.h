// Router: the experts of each token and their weights, from the logits of a mixture's router.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace awqd::wire {

// How scores are made of logits.
enum class RouterScoring : uint8_t { kSoftmax, kSigmoid, kSqrtSoftplus };

struct Router {
  RouterScoring scoring = RouterScoring::kSoftmax;
  int64_t experts = 1;
  int64_t top_k = 1;                   // 1 to topk_group * experts / n_group
  std::vector<float> correction_bias;  // [experts], or empty
  int64_t n_group = 1;                 // divides experts
  int64_t topk_group = 1;              // 1 to n_group
  bool norm_topk_prob = false;
  float routed_scaling_factor = 1;
};

// The choices of tokens in a row.
struct RoutedChoices {
  std::vector<int32_t> ids;    // [tokens, top_k]
  std::vector<float> weights;  // [tokens, top_k]
};

// `logits`: [tokens, experts]. In FP32, after the routers of transformers (DeepseekV3TopkRouter):
//   score = scoring(logit); choice = score + correction_bias
//   the topk_group groups with the largest sum of two choices (without a bias: largest choice) stay
//   the top_k largest choices of these, in descending order; of equal ones the lower number first
//   weight = score (/ (sum of the token's + 1e-20), if norm_topk_prob) * routed_scaling_factor
// NaN counts as the largest.
RoutedChoices ChooseExperts(const Router& router, absl::Span<const float> logits);

}  // namespace awqd::wire
