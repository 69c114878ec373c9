// KV4 (kernels/kv4.h) as works: a block of keys or values to 4-bit codes, and back.
#pragma once

#include <cstdint>

#include "kernels/base/math.h"
#include "kernels/kv4.h"
#include "server/engine/work.h"

namespace awqd::engine {

// The base of both works: they read no weight, so any device may run them; they never merge.
class Kv4Work : public Work {
 public:
  Kv4Shape shape;
  DType scale_dtype = DType::kFp16;
  Kv4Per per = Kv4Per::kRow;

  absl::Span<const std::shared_ptr<const model::PlacedWeight>> weights() const final { return {}; }
  int64_t tokens() const final { return shape.tokens; }
  int64_t cost() const final;
  absl::Status Run(Lane& lane, const batching::Batch& batch, char* result,
                   ExecutionReport* report) const final;

  // The bytes of an array of scales, or of zeros.
  int64_t scale_bytes() const { return Kv4Scales(shape, per) * SizeOf(scale_dtype); }

 protected:
  // The same for `count` tokens.
  Kv4Shape Tokens(int64_t count) const { return {count, shape.heads, shape.head_dim}; }
  // Runs `count` tokens from `begin` on, as one step. `result` is that of the whole work.
  virtual absl::Status RunTokens(Lane& lane, int64_t begin, int64_t count, char* result) const = 0;
};

// The result is the codes, UINT8 [tokens, heads, ceil(head_dim / 2)]. Per Kv4Per::kRow the scales,
// [tokens, heads] of scale_dtype, follow at scale_offset, and the zeros at zero_offset; bytes
// between are 0.
class Kv4StoreWork final : public Kv4Work {
 public:
  Payload x;  // [tokens, heads, head_dim] of x_dtype, from Engine::staging
  DType x_dtype = DType::kFp16;
  // Arrays of scale_dtype, as many elements as `per` says; empty for Kv4Per::kRow, which computes
  // them.
  Payload given_scale, given_zero;

  static constexpr int64_t kAlign = 256;
  int64_t scale_offset() const { return RoundUp(shape.code_bytes(), kAlign); }
  int64_t zero_offset() const { return scale_offset() + RoundUp(scale_bytes(), kAlign); }

  absl::string_view name() const override { return "QuantizeKv"; }
  int64_t bytes() const override { return x.size() + given_scale.size() + given_zero.size(); }
  int64_t result_bytes() const override {
    return per == Kv4Per::kRow ? zero_offset() + scale_bytes() : shape.code_bytes();
  }
  void FreeInputs() override { x = given_scale = given_zero = Payload(); }

 private:
  absl::Status RunTokens(Lane& lane, int64_t begin, int64_t count, char* result) const override;
};

// The result is the elements, [tokens, heads, head_dim] of out_dtype.
class Kv4LoadWork final : public Kv4Work {
 public:
  Payload codes;        // UINT8 [tokens, heads, ceil(head_dim / 2)]
  Payload scale, zero;  // of scale_dtype, as many as `per` says
  Kv4Form form = Kv4Form::kExact;
  DType out_dtype = DType::kFp16;

  absl::string_view name() const override { return "DequantizeKv"; }
  int64_t bytes() const override { return codes.size() + scale.size() + zero.size(); }
  int64_t result_bytes() const override {
    return shape.rows() * shape.head_dim * SizeOf(out_dtype);
  }
  void FreeInputs() override { codes = scale = zero = Payload(); }

 private:
  absl::Status RunTokens(Lane& lane, int64_t begin, int64_t count, char* result) const override;
};

}  // namespace awqd::engine
