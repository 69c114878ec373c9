// Benches of several products: a mixture of experts as the engine runs it, and the 4-bit key/value
// cache.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/bench/bench.h"

namespace awqd::bench {

class Library;  // library.h

struct MixtureCase {
  int64_t experts = 8;
  int64_t top_k = 2;
  int64_t hidden = 4096;
  int64_t middle = 14336;
  QuantizationScheme scheme;
  DType x = DType::kFp16;
  bool one_by_one = false;  // never several experts by one kernel
  ActivationQuantization quantization = ActivationQuantization::kNone;  // or to E4M3
};

// Times y = sum over a token's experts of w * down(silu(gate(x)) * up(x)) for each count of tokens,
// with a routing of its own for every copy of the call: gathering rows, three products, the steps
// between them, and the weighted sum. Prints a line and JSON for each; with `library`, if it is not
// null, one more for awqd_grouped_mlp, timed in turns.
void TimeMixture(const MixtureCase& spec, const std::vector<int64_t>& tokens,
                 const Library* library, Machine& machine);

// Times store and load of keys or values of this shape, in FP16, with a scale and a zero for each
// row. Loads are checked against the stored codes.
void TimeKv4(int64_t tokens, int64_t heads, int64_t head_dim, Machine& machine);

}  // namespace awqd::bench
