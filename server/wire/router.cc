// Scores, groups, choices: a token at a time.
#include "server/wire/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace awqd::wire {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void Score(RouterScoring scoring, absl::Span<const float> logits, std::vector<float>* scores) {
  if (scoring == RouterScoring::kSoftmax) {
    const float largest = *std::max_element(logits.begin(), logits.end());
    float sum = 0;
    for (size_t e = 0; e < logits.size(); ++e) {
      (*scores)[e] = std::exp(logits[e] - largest);
      sum += (*scores)[e];
    }
    for (float& score : *scores) score /= sum;
    return;
  }
  for (size_t e = 0; e < logits.size(); ++e) {
    const float v = logits[e];
    // log(1 + exp(v)) is v itself where exp would overflow.
    (*scores)[e] = scoring == RouterScoring::kSigmoid ? 1 / (1 + std::exp(-v))
                   : v > 20                           ? std::sqrt(v)
                                                      : std::sqrt(std::log1p(std::exp(v)));
  }
}

// Moves the numbers of the `count` largest values of `by`, in descending order, to the front.
void SortLargest(const std::vector<float>& by, int64_t count, std::vector<int32_t>* numbers) {
  std::partial_sort(numbers->begin(), numbers->begin() + count, numbers->end(),
                    [&](int32_t a, int32_t b) { return by[a] != by[b] ? by[a] > by[b] : a < b; });
}

// Sets `numbers` to the experts of the chosen groups.
void ChooseGroups(const Router& router, const std::vector<float>& choices,
                  std::vector<int32_t>* numbers) {
  const int64_t size = router.experts / router.n_group;
  std::vector<float> of_groups;
  for (int64_t group = 0; group < router.n_group; ++group) {
    float first = -kInfinity, second = -kInfinity;
    for (int64_t e = group * size; e < (group + 1) * size; ++e) {
      second = std::max(second, std::min(first, choices[e]));
      first = std::max(first, choices[e]);
    }
    of_groups.push_back(router.correction_bias.empty() || size == 1 ? first : first + second);
  }
  std::vector<int32_t> groups(router.n_group);
  std::iota(groups.begin(), groups.end(), 0);
  SortLargest(of_groups, router.topk_group, &groups);
  numbers->clear();
  for (int64_t i = 0; i < router.topk_group; ++i) {
    for (int64_t e = 0; e < size; ++e) {
      numbers->push_back(static_cast<int32_t>(groups[i] * size + e));
    }
  }
}

}  // namespace

RoutedChoices ChooseExperts(const Router& router, absl::Span<const float> logits) {
  const auto tokens = static_cast<int64_t>(logits.size()) / router.experts;
  RoutedChoices out;
  out.ids.reserve(tokens * router.top_k);
  out.weights.reserve(tokens * router.top_k);
  std::vector<float> scores(router.experts), choices;
  std::vector<int32_t> numbers;
  for (int64_t token = 0; token < tokens; ++token) {
    Score(router.scoring, logits.subspan(token * router.experts, router.experts), &scores);
    choices = scores;
    for (size_t e = 0; e < router.correction_bias.size(); ++e) {
      choices[e] += router.correction_bias[e];
    }
    for (float& choice : choices) {
      if (std::isnan(choice)) choice = kInfinity;
    }
    numbers.resize(router.experts);
    std::iota(numbers.begin(), numbers.end(), 0);
    if (router.topk_group < router.n_group) ChooseGroups(router, choices, &numbers);
    SortLargest(choices, router.top_k, &numbers);
    float sum = 0;
    for (int64_t j = 0; j < router.top_k; ++j) sum += scores[numbers[j]];
    const float divisor = router.norm_topk_prob ? sum + 1e-20f : 1;
    for (int64_t j = 0; j < router.top_k; ++j) {
      out.ids.push_back(numbers[j]);
      out.weights.push_back(scores[numbers[j]] / divisor * router.routed_scaling_factor);
    }
  }
  return out;
}

}  // namespace awqd::wire
