// The product of quantised activations by quads (bodies/quads_body.h), where the CPU has the
// instruction and the weight the shape for it.
#pragma once

#include <cstdint>

#include "kernels/cpu/k16_access.h"

namespace awqd::cpu {

// The most tokens for which this product is the one to take: none where the instruction set has no
// such product for the weight's codes, groups and scales. With more the other one, whose bits are
// the same, is faster.
int64_t MostTokensOfQuads(const K16Weight& weight, CpuIsa isa);

// Of up to `rows` tokens, at most kScaledRows.
int64_t QuadBytes(const K16Weight& weight, const DeviceInfo& device, int64_t rows);

// y = x_scale * (x @ W) + bias of the tokens of args, at most kScaledRows. `memory`: QuadBytes,
// aligned to 64.
void MultiplyByQuads(const MatmulArgs& args, const K16Weight& weight, void* memory);

}  // namespace awqd::cpu
