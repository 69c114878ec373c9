// A body is the inner loops of the CPU rows for one instruction set: tables of functions.
//
// The sources behind a table are compiled with flags that other machines cannot run. So this header
// names plain types only: an inline function of a shared header, compiled there, could be the copy
// that the linker keeps for everybody.
#pragma once

#include <cstdint>

namespace awqd::cpu {

// kByte: of zeros an unsigned integer, of scales an index into K16Weight::scale_values.
enum class Element : uint8_t { kFp16, kBf16, kFp32, kByte, kInt32 };

enum class Code : uint8_t {
  kInteger,  // unsigned, of 1 to 4 or of 8 bits
  kValue,    // 4 bits: one of K16Weight::values
  kE4m3,     // 8 bits
};

// A weight in layout k16 (kernels/layouts/k16.cc), as pointers and counts.
struct K16Weight {
  const uint8_t* codes = nullptr;   // [tiles][blocks][8][block_bytes]
  const uint8_t* scales = nullptr;  // [tiles][groups][8] of scale_type; null, as kByte: 1
  const uint8_t* zeros = nullptr;   // [tiles][groups][8] of zero_type; null: `zero` everywhere
  const float* outer = nullptr;     // [n]; null: 1 everywhere
  // [256]: what a scale of one byte stands for.
  const float* scale_values = nullptr;
  // The value of an index of 4 bits, whose lowest `bits` are the code, for codes of up to 4 bits.
  float values[16] = {};
  float zero = 0;
  Code code = Code::kInteger;
  Element scale_type = Element::kFp16;
  Element zero_type = Element::kByte;
  bool zero_after = false;  // code * scale - zero, else (code - zero) * scale
  // A product multiplies by weights as Dequantize rounds them to FP16. Of up to 4 bits.
  bool round_to_half = false;
  // A column has one scale and its weights no zero to subtract: a product multiplies sums, not
  // weights. Of 8 bits.
  bool scale_sums = false;
  // Zeros are integers, and so are scales (INT8) if there are any: a weight without its outer scale
  // is an integer. Of integer codes.
  bool integers = false;
  int bits = 4;         // that a code takes
  int scale_bytes = 2;  // of one
  int zero_bytes = 1;
  int64_t block_bytes = 0;
  int64_t k = 0;
  int64_t n = 0;
  int64_t group_size = 0;
  int64_t groups = 0;
  int64_t runs_per_group = 0;
  int64_t runs = 0;
  int64_t tiles = 0;
  int64_t blocks = 0;
};

// y[0:rows, 8 tile_begin : 8 tile_end] = x @ W + bias.
struct ProductTask {
  const float* x = nullptr;  // [rows, padded K]; padding rows of groups hold 0
  int64_t x_stride = 0;      // floats
  int64_t rows = 0;
  int64_t tile_begin = 0;
  int64_t tile_end = 0;
  const float* row_factors = nullptr;  // [rows]: multiply the sums of each; null: all are 1
  const float* bias = nullptr;         // [N] or null
  void* y = nullptr;                   // row 0, column 0 of the whole result
  int64_t y_stride = 0;                // elements
  Element y_type = Element::kFp16;
  float* scratch = nullptr;  // of scratch_floats, 64-byte aligned
};

// out = W[row_begin:row_end, col_begin:col_end] with rows of one block and columns of at most
// kDequantizeTiles tiles.
struct DequantizeTask {
  int64_t block = 0;
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t col_begin = 0;
  int64_t col_end = 0;
  void* out = nullptr;     // element (row_begin, col_begin)
  int64_t out_stride = 0;  // elements
  Element out_type = Element::kFp16;
  bool stream = false;  // the result will not be read soon: go around the caches
};
inline constexpr int64_t kDequantizeTiles = 32;

// Rows of KV4 (kernels/kv4.h), one after the other, of `cols` elements and (cols + 1) / 2 bytes of
// codes each. Arrays of floats have one for each row.
struct Kv4Rows {
  int64_t rows = 0;
  int64_t cols = 0;
  Element type = Element::kFp16;  // of the elements
};

// How codes become elements.
struct Kv4Decoding {
  const float* scale = nullptr;
  // In the fused form this is the addend, and both are FP16 numbers.
  const float* zero = nullptr;
  bool fused = false;
  bool stream = false;  // the result will not be read soon: go around the caches
};

// --- Products of activations as integers (bodies/integers) ---

// Activations are INT16, as two INT8 planes or whole, or INT8, which is the case of one plane. A
// block is 128 rows of K.
inline constexpr int64_t kBlockRows = 128;
inline constexpr int64_t kInt16BlockBytes = 2 * kBlockRows;
// The most tokens of a task.
inline constexpr int64_t kMaxIntegerRows = 256;
// Tokens that are side by side after IntegerProduct::interleave.
inline constexpr int64_t kLaneTokens = 16;

// One token, as the prologue of a product writes it. A token of FP16 or BF16 becomes INT16 numbers
// q with a step for each block, x ~ step * q (integers/int16_block.h). INT8 activations are q.
struct IntegerToken {
  void* q = nullptr;        // [blocks][128] of INT8, [blocks][kInt16BlockBytes] of INT16
  int32_t* sums = nullptr;  // of q: [blocks] of FP16 and BF16, [groups] of INT8
  float* steps = nullptr;   // [blocks]; null of INT8
};

// y[0:rows, 8 tile_begin : 8 tile_end] = x @ W + bias, where x = step * q, or x_scale * q of INT8.
struct IntegerTask {
  const void* q = nullptr;         // of `rows` tokens, one after the other; so are the next two
  const int32_t* sums = nullptr;   // not read where a product needs none
  const float* steps = nullptr;    // null of INT8
  const float* x_scale = nullptr;  // [rows]; null: 1
  int64_t rows = 0;                // at most kMaxIntegerRows
  int64_t tile_begin = 0;
  int64_t tile_end = 0;
  const float* bias = nullptr;  // [N] or null
  void* y = nullptr;            // row 0, column 0 of the whole result
  int64_t y_stride = 0;         // elements
  Element y_type = Element::kFp16;
  void* scratch = nullptr;  // 64-byte aligned
};

// A way to multiply integers: what makes them, and the loops over them.
struct IntegerProduct {
  static constexpr int64_t kNoLimit = int64_t{1} << 62;

  // Null where the instruction set has no such product. Returns false for a token of FP16 or BF16
  // that INT16 holds badly; what it wrote is worthless then. `type`: of FP16 and BF16 elements.
  bool (*prologue)(const K16Weight&, const void* x, Element type, const IntegerToken&) = nullptr;
  void (*product)(const K16Weight&, const IntegerTask&) = nullptr;
  // Null, or makes the product's [words][kLaneTokens] of [rows][words], for each array of a task:
  // at most kLaneTokens rows, the others are 0. Words are rounded up to a multiple of kLaneTokens.
  void (*interleave)(const void* in, int64_t rows, int64_t words, void* out) = nullptr;
  bool int16 = false;       // of FP16 and BF16 activations, else of INT8
  int64_t token_bytes = 0;  // of a block of q
  // The tokens for which it is the fastest, of codes of 4 and of 8 bits.
  int64_t min_tokens = 0, min_tokens_8bit = 0;
  int64_t max_tokens = kNoLimit, max_tokens_8bit = kNoLimit;
  int64_t group_rows = kBlockRows;  // a group is a multiple of them, or all of K
};

// The products of an instruction set. All but the last two take codes of 4 and 8 bits.
struct IntegerProducts {
  IntegerProduct int16_columns;  // few tokens of FP16 or BF16, codes as they are stored
  IntegerProduct int16_lanes;    // more of them, side by side
  IntegerProduct int16_panels;   // many, from packed panels
  IntegerProduct int8_bytes;     // INT8 tokens as bytes
  IntegerProduct int8_lanes;     // the same, of more tokens, side by side
  IntegerProduct int8_panels;    // INT8 tokens as 16-bit integers, from packed panels: any weight
  // y = q @ (code - zero), in INT32: x_scale and bias are not read. Prologue, token_bytes and
  // scratch are those of int8_panels.
  void (*int32_product)(const K16Weight&, const IntegerTask&) = nullptr;
  int64_t panel_scratch_bytes = 0;  // of products from panels
};
constexpr int64_t ColumnScratchBytes(int64_t groups, int64_t rows) {
  return (3 * groups * 8 + rows * 8) * 4;
}

// Partial sums of a token that vector_block adds to.
inline constexpr int64_t kVectorLanes = 32;

struct Bodies {
  void (*product)(const K16Weight&, const ProductTask&);
  int64_t scratch_floats;  // of a ProductTask
  void (*dequantize)(const K16Weight&, const DequantizeTask&);
  // Columns of one tile, each K floats long and `stride` floats apart, for a dense product. May
  // write up to 16 floats past the end of a column.
  void (*columns)(const K16Weight&, int64_t tile, float* out, int64_t stride);
  void (*to_float)(const void* in, Element type, int64_t count, float* out);
  // out[i] = round(in[i] + bias[i]); bias may be null.
  void (*from_float)(const float* in, const float* bias, int64_t count, Element type, void* out);
  // The bits of the largest magnitude, which order magnitudes as integers do. This and to_int8 read
  // whole vectors of 16.
  int32_t (*largest_bits)(const float* in, int64_t count);
  // out[i] = in[i] / scale between `least` and 127, rounded to nearest even.
  void (*to_int8)(const float* in, int64_t count, float scale, float least, int8_t* out);
  // Least and greatest finite element; of none, +infinity and -infinity.
  void (*kv4_ranges)(const Kv4Rows&, const void* x, float* min, float* max);
  void (*kv4_codes)(const Kv4Rows&, const void* x, const float* inverse, const float* zero,
                    uint8_t* codes);
  void (*kv4_elements)(const Kv4Rows&, const uint8_t* codes, const Kv4Decoding&, void* out);
  // Adds to each row's lanes [rows][kVectorLanes] its x times 256 weights, codes[i] * scales[i / 16].
  void (*vector_block)(const int8_t* codes, const float* scales, const float* x, int64_t x_stride,
                       int64_t rows, float* lanes);
};

extern const Bodies kPortableBodies;
extern const IntegerProducts kPortableIntegers;
// Only in builds for x86-64.
extern const Bodies kAvx2Bodies;
extern const Bodies kAvx512Bodies;
extern const IntegerProducts kAvx2Integers;
extern const IntegerProducts kAvxVnniIntegers;
extern const IntegerProducts kAvx512Integers;
extern const IntegerProducts kAvx512VnniIntegers;
// AMX's products of many tokens; fewer tokens, and the other products, are those of AVX-512 VNNI.
extern const IntegerProduct kAmxInt16;
extern const IntegerProduct kAmxInt8;
// Only in builds for aarch64.
extern const Bodies kNeonBodies;
extern const IntegerProducts kNeonIntegers;
// NEON's dot products of bytes; the other products are those of kNeonIntegers.
extern const IntegerProduct kNeonDotInt16;
extern const IntegerProduct kNeonDotInt8;

}  // namespace awqd::cpu
