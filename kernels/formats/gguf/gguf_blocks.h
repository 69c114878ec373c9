// The block types of GGUF that are read: where a block has its codes and its scales.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/scheme.h"

namespace awqd {

// Codes that are unpacked at a time. Every block is whole runs of them.
inline constexpr int64_t kGgufRun = 32;

struct GgufBlock {
  absl::string_view name;  // "Q4_K"
  int64_t codes = 32;      // of a block
  int64_t bytes = 0;       // of a block
  int64_t group = 32;      // codes that share a scale
  CodeKind code = CodeKind::kUnsigned;
  VectorCode vector = VectorCode::kNone;  // of kVector, whose blocks stay as they are
  absl::Span<const float> table = {};     // of kTable
  int bits = 4;
  ZeroKind zero_kind = ZeroKind::kConstant;
  int zero = 0;                      // of kConstant
  DType zero_dtype = DType::kFp16;   // of kRealAfter
  DType scale_dtype = DType::kFp16;  // as they are decoded

  // Run `run` of a block's codes, each as a byte below 2^bits. Null of kVector.
  void (*run)(const uint8_t* block, int run, uint8_t* to) = nullptr;
  // The scales and the zeros of a block's groups in order, raw bits of their types; zeros are
  // written where the type has real ones. False when one is infinite or NaN.
  bool (*cells)(const uint8_t* block, uint8_t* scales, uint8_t* zeros) = nullptr;
};

absl::Span<const GgufBlock> GgufBlocks();

}  // namespace awqd
