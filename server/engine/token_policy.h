// Policy: which path a product takes, by the number of tokens in its batch. Below the threshold the
// fused path, from it on the path dequantize.
//
// The default of 256 is vLLM's (AWQLinearMethod.apply, vllm PR #2566). From there on, decoding the
// weight once and multiplying it by a dense product is cheaper than decoding it again for every
// tile of tokens.
#pragma once

#include <cstdint>

namespace awqd::batching {

struct TokenPolicy {
  int64_t threshold = 256;  // 0: always the path dequantize

  constexpr bool UseFused(int64_t tokens) const { return tokens < threshold; }
};

}  // namespace awqd::batching
