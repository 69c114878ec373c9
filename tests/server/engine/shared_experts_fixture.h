// Stacks of experts on several CPU devices, and the same on one device for comparison.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/engine/experts_work.h"
#include "tests/server/engine/several_devices_fixture.h"
#include "tests/testing/random_weight.h"

namespace awqd::engine {

// The weights of a mixture: gate and up [K, I], down [I, N] of each expert.
struct Mixture {
  std::vector<HostWeight> gate, up, down;
};

struct MixtureSpec {
  int64_t experts = 4, k = 64, middle = 72, n = 40, group = 32;
  bool bias = true;
};

inline Mixture RandomMixture(const MixtureSpec& spec) {
  const auto make = [&](int64_t k, int64_t n, uint64_t seed) {
    std::vector<HostWeight> out;
    for (int64_t e = 0; e < spec.experts; ++e) {
      out.push_back(testing::RandomWeight({.k = k,
                                           .n = n,
                                           .scheme = Asymmetric(4, spec.group),
                                           .bias = spec.bias,
                                           .seed = seed + static_cast<uint64_t>(e)}));
    }
    return out;
  };
  return {make(spec.k, spec.middle, 100), make(spec.k, spec.middle, 5000),
          make(spec.middle, spec.n, 10000)};
}

struct PlacedMixture {
  std::shared_ptr<const model::WeightStack> gate, up, down;
};

inline PlacedMixture Spread(Machine& machine, const Mixture& mixture) {
  return {machine.Spread(mixture.gate), machine.Spread(mixture.up), machine.Spread(mixture.down)};
}
// Places a mixture as --shard=columns does, or whole.
inline PlacedMixture Placed(Machine& machine, const Mixture& mixture, bool cut) {
  using enum model::Placing;
  return {machine.Stack(mixture.gate, cut ? kMlpColumns : kWhole),
          machine.Stack(mixture.up, cut ? kMlpColumns : kWhole),
          machine.Stack(mixture.down, cut ? kMlpRows : kWhole)};
}

// The tokens of a request, and their experts.
struct Choices {
  DType dtype = DType::kFp16;
  int64_t rows = 1, top_k = 1;
  bool of_experts = true, summed = false;
  std::vector<uint8_t> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

struct ChoicesSpec {
  int64_t rows = 1, top_k = 1, experts = 1, k = 64;
  bool summed = false;
  uint64_t seed = 1;
};

inline Choices RandomChoices(const ChoicesSpec& spec) {
  std::mt19937_64 random(spec.seed);
  Choices out = {.rows = spec.rows, .top_k = spec.top_k, .summed = spec.summed};
  out.dtype = std::vector{DType::kFp16, DType::kBf16, DType::kFp32}[random() % 3];
  out.x = testing::RandomMatrix(spec.rows, spec.k, out.dtype, spec.seed);
  for (int64_t i = 0; i < spec.rows * spec.top_k; ++i) {
    out.ids.push_back(static_cast<int32_t>(random() % spec.experts));
    if (spec.summed) out.weights.push_back(static_cast<float>(random() % 1000) / 1000 - 0.3f);
  }
  return out;
}

// Choices whose activations are E4M3 with scales of tokens or of blocks of 128, and the same with
// the numbers that they stand for.
struct SentChoices {
  Choices codes, floats;
  Rounding rounding;  // of `codes`
  std::vector<float> scales;
};

inline SentChoices RandomSent(const ChoicesSpec& spec, bool blocks) {
  using enum ActivationQuantization;
  SentChoices out = {.codes = RandomChoices(spec),
                     .rounding = {.how = blocks ? kFloat8PerBlock : kFloat8Static}};
  out.floats = out.codes;
  out.codes.dtype = DType::kE4m3;
  out.floats.dtype = DType::kFp32;
  out.codes.x = testing::RandomMatrix(spec.rows, spec.k, DType::kE4m3, spec.seed);
  out.floats.x.resize(out.codes.x.size() * 4);
  for (int64_t i = 0; i < spec.rows * spec.k; ++i) {
    if (i % spec.k % (blocks ? 128 : spec.k) == 0) {
      out.scales.push_back(0.1f * static_cast<float>(1 + i % 7));
    }
    testing::SetElement(&out.floats.x, DType::kFp32, i,
                        testing::GetElement(out.codes.x, DType::kE4m3, i) * out.scales.back());
  }
  return out;
}

template <typename Routed>
Routed Fill(Machine& machine, const Choices& choices, Routed work) {
  work.x = *machine.engine().staging().Get(static_cast<int64_t>(choices.x.size()));
  if (!choices.x.empty()) std::memcpy(work.x.data(), choices.x.data(), choices.x.size());
  work.x_dtype = work.out_dtype = choices.dtype;
  work.rows = choices.rows;
  work.top_k = choices.top_k;
  work.of_experts = choices.of_experts;
  work.summed = choices.summed;
  work.ids = choices.ids;
  work.router_weights = choices.weights;
  work.activation = ActivationFunction::kSilu;
  return work;
}
inline GroupedMatmulWork Grouped(Machine& machine, std::shared_ptr<const model::WeightStack> stack,
                                 const Choices& choices) {
  GroupedMatmulWork work;
  work.stack = std::move(stack);
  return Fill(machine, choices, std::move(work));
}
inline GatedMlpWork Mlp(Machine& machine, const PlacedMixture& on, const Choices& choices) {
  return Fill(machine, choices, GatedMlpWork(on.gate, on.up, on.down));
}

}  // namespace awqd::engine
