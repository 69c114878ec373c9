// Vec, 16 floats, of the instruction set that a source is compiled for. NEON belongs to every
// aarch64 machine, so the sources of its bodies say AWQD_NEON_BODY (kernels/cpu/CMakeLists.txt):
// the portable body of the same machine must not take its parts.
#pragma once

#if defined(__AVX512BW__)
#include "kernels/cpu/bodies/vec_avx512.h"
#elif defined(__AVX2__)
#include "kernels/cpu/bodies/vec_avx2.h"
#elif defined(AWQD_NEON_BODY)
#include "kernels/cpu/bodies/vec_neon.h"
#else
#include "kernels/cpu/bodies/vec_portable.h"
#endif

namespace awqd::cpu {
namespace {

constexpr int64_t ElementBytes(Element type) { return type == Element::kFp32 ? 4 : 2; }

}  // namespace
}  // namespace awqd::cpu
