// A linear in GPTQ's tensors, which several quantisers write with small differences:
//
//   qweight I32 [K*bits/32, N]: codes along K     W[k, n] = (q - z) * scales[j, n], j = g_idx[k]
//   qzeros I32 [G, N*bits/32]: zero points along N
//   scales F16 or BF16 [G, N]; the last group may be short
//   g_idx I32 [K], optional: without it j = k / group_size
//   bias [N], optional
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/formats/format.h"
#include "kernels/formats/gptq_words.h"

namespace awqd {

inline constexpr absl::string_view kGptqSuffixes[] = {"qweight", "qzeros", "scales", "g_idx",
                                                      "bias"};
inline constexpr absl::string_view kGptqOptional[] = {"g_idx", "bias"};
inline constexpr absl::string_view kGptqCodeTypes[] = {"I32"};

struct GptqLinear {
  int bits = 0;
  int64_t group_size = 0;        // -1: all of K; 0: not said
  std::optional<bool> sym;       // true: every zero point is 2^(bits-1)
  std::optional<bool> desc_act;  // true: g_idx is needed; false: it is k / group_size
  GptqWords words = GptqWords::kDense;
  bool zeros_less_one = false;  // qzeros holds z - 1
};

// Rows that g_idx mixes are sorted by their group, and the weight has an order. INVALID_ARGUMENT as
// Format::decode has it. Sets no HostWeight::format.
absl::StatusOr<HostWeight> DecodeGptqLinear(const GptqLinear& settings,
                                            const LinearTensors& tensors);

}  // namespace awqd
