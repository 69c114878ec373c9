// KV4: keys and values of a cache as 4-bit codes, after QServe. Store converts a block of elements
// to codes, load converts codes to elements. kv4_math.h defines the bits.
//
// A row holds the elements of one head for one token: head_dim elements, with one scale and one
// zero. Element 2i of a row is the low half of byte i, element 2i + 1 the high half; the last half
// byte of an odd head_dim is 0.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/device.h"
#include "kernels/types.h"

namespace awqd {

struct Kv4Shape {
  int64_t tokens = 0;
  int64_t heads = 1;
  int64_t head_dim = 1;

  constexpr int64_t rows() const { return tokens * heads; }
  constexpr int64_t row_bytes() const { return (head_dim + 1) / 2; }  // bytes of codes
  constexpr int64_t code_bytes() const { return rows() * row_bytes(); }
};

// The elements that share a scale and a zero.
enum class Kv4Per : uint8_t {
  kRow,    // arrays [tokens, heads]
  kHead,   // arrays [heads], the same for all tokens
  kTensor  // arrays [1]
};

// Elements of an array of scales, or of zeros.
constexpr int64_t Kv4Scales(const Kv4Shape& shape, Kv4Per per) {
  return per == Kv4Per::kRow ? shape.rows() : per == Kv4Per::kHead ? shape.heads : 1;
}

// Pointers are to the device's memory, and aligned to their elements. GPUs reach the speed of their
// memory if x and codes are aligned to 16 bytes and head_dim is a multiple of 8 up to 1024.
struct Kv4StoreArgs {
  Kv4Shape shape;
  const void* x = nullptr;  // [tokens, heads, head_dim]
  DType x_dtype = DType::kFp16;
  uint8_t* codes = nullptr;  // out: [tokens, heads, ceil(head_dim / 2)]
  DType scale_dtype = DType::kFp16;
  // kRow: each row's scale and zero are computed from its elements and written. Else the caller
  // gives them; any number is legal.
  Kv4Per per = Kv4Per::kRow;
  void* scale = nullptr;  // out, for kRow only
  void* zero = nullptr;
  const void* given_scale = nullptr;  // in, for kHead and kTensor only
  const void* given_zero = nullptr;
};

enum class Kv4Form : uint8_t {
  kExact,  // (u - zero) * scale in FP32, then one rounding to the output type
  kFused   // QServe's fma(u, half(scale), half(-scale * zero)) in FP16; for FP16 outputs only
};

struct Kv4LoadArgs {
  Kv4Shape shape;
  const uint8_t* codes = nullptr;  // [tokens, heads, ceil(head_dim / 2)]
  DType scale_dtype = DType::kFp16;
  Kv4Per per = Kv4Per::kRow;
  const void* scale = nullptr;
  const void* zero = nullptr;
  Kv4Form form = Kv4Form::kExact;
  void* out = nullptr;  // [tokens, heads, head_dim]
  DType out_dtype = DType::kFp16;
};

// Enqueues on `stream`; without tokens it does nothing. INVALID_ARGUMENT, naming the field: a
// negative number of tokens, no heads, no elements in a head, a shape beyond 2^56 elements,
// elements or results other than FP16, BF16 and FP32, scales other than FP16 and FP32, results
// other than FP16 in the form kFused, a null pointer. The stream's Synchronize returns errors of
// the kernel itself.
absl::Status Kv4Store(const Kv4StoreArgs& args, Device& device, StreamView stream);
absl::Status Kv4Load(const Kv4LoadArgs& args, Device& device, StreamView stream);

// The functions of a backend. Their args are valid, and there is at least one token.
struct Kv4Ops {
  absl::string_view name;  // path of its source beneath kernels/ without extension, for reports
  absl::Status (*store)(const Kv4StoreArgs&, Device&, StreamView);
  absl::Status (*load)(const Kv4LoadArgs&, Device&, StreamView);
};

// The functions of the device's backend.
const Kv4Ops& Kv4Of(const Device& device);

}  // namespace awqd
