// Policy: the token-count heuristic. Fewer tokens than the threshold: fused kernel; otherwise
// dequantise + dense.
//
// The default of 256 is vLLM's (AWQLinearMethod.apply, vllm PR #2566): from there on a dense
// product of a weight that was decoded once is cheaper than decoding it again for every tile of
// tokens.
#pragma once

#include <cstdint>

namespace awqd::batching {

struct TokenPolicy {
  int64_t threshold = 256;  // 0: always dequantise + dense

  constexpr bool UseFused(int64_t tokens) const { return tokens < threshold; }
};

}  // namespace awqd::batching
