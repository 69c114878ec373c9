// Bodies: the inner loops of the CPU rows, one table of them per instruction set.
//
// The sources behind a table are compiled with flags that other machines cannot run. So this header
// names plain types only: an inline function of a shared header, compiled there, could be the copy
// that the linker keeps for everybody.
#pragma once

#include <cstdint>

namespace awqd::cpu {

// kByte: of zeros an unsigned integer, of scales an index into K16Weight::scale_values.
enum class Element : uint8_t { kFp16, kBf16, kFp32, kByte };

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
  // What an index of 4 bits stands for, whose lowest `bits` are the code. Of up to 4 bits.
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

// y[0:rows, 8 tile_begin : 8 tile_end] = x @ (code - zero), of integer codes and zeros.
struct IntegerTask {
  const int16_t* x = nullptr;  // [rows, blocks * 128], values of INT8; padding rows hold 0
  int64_t x_stride = 0;        // elements
  int64_t rows = 0;
  int64_t tile_begin = 0;
  int64_t tile_end = 0;
  int32_t* y = nullptr;        // row 0, column 0 of the whole result
  int64_t y_stride = 0;        // elements
  int16_t* scratch = nullptr;  // [8, blocks * 128]
};

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
  // Of the fused form the addend instead. It and the scale are FP16 numbers then.
  const float* zero = nullptr;
  bool fused = false;
  bool stream = false;  // the result will not be read soon: go around the caches
};

// y[m, n] = x_scale[m] * (x @ W)[m, n] + bias[n] for rows [0, rows) and columns
// [8 tile_begin, 8 tile_end), of integer codes.
struct ScaledTask {
  const int16_t* x = nullptr;  // [rows, blocks * 128], values of INT8; padding rows hold 0
  int64_t x_stride = 0;        // elements
  // [rows, groups]: the sum of x over the rows of each group. Read for real zeros only.
  const float* x_sums = nullptr;
  const float* x_scale = nullptr;  // [rows]
  int64_t rows = 0;                // at most kScaledRows
  int64_t tile_begin = 0;
  int64_t tile_end = 0;
  const float* bias = nullptr;  // [N] or null
  void* y = nullptr;            // row 0, column 0 of the whole result
  int64_t y_stride = 0;         // elements
  Element y_type = Element::kFp16;
  void* scratch = nullptr;  // of Bodies::scaled_scratch_bytes, 64-byte aligned
};
inline constexpr int64_t kScaledRows = 192;

// What differs from AVX-512 alone where a machine has VNNI too.
struct IntegerBodies {
  void (*integer_product)(const K16Weight&, const IntegerTask&);
  void (*scaled_product)(const K16Weight&, const ScaledTask&);
  int64_t scaled_scratch_bytes;
};

// A token of FP16 or BF16 as 16-bit integers q (bodies/int16_block.h), by blocks of 128 rows.
inline constexpr int64_t kIntegerRows = 128;
inline constexpr int64_t kIntegerBytes = 2 * kIntegerRows;
struct TokenIntegers {
  void* values = nullptr;   // [blocks][kIntegerBytes]
  float* steps = nullptr;   // [blocks]: x is about step * q
  int32_t* sums = nullptr;  // [blocks]: of q
};

// y[0:rows, 8 tile_begin : 8 tile_end] = x @ W + bias, of integer codes of 4 or 8 bits whose groups
// are whole blocks, or one.
struct StandInTask {
  const void* values = nullptr;   // [rows][blocks][kIntegerBytes]
  const float* steps = nullptr;   // [rows][blocks]
  const int32_t* sums = nullptr;  // [rows][blocks]
  int64_t rows = 0;               // of pairs at most kScaledRows
  int64_t tile_begin = 0;
  int64_t tile_end = 0;
  const float* bias = nullptr;  // [N] or null
  void* y = nullptr;            // row 0, column 0 of the whole result
  int64_t y_stride = 0;         // elements
  Element y_type = Element::kFp16;
  // 64-byte aligned; of DigitScratchFloats, of pairs IntegerBodies::scaled_scratch_bytes.
  void* scratch = nullptr;
};
constexpr int64_t DigitScratchFloats(int64_t groups, int64_t rows) {
  return 3 * groups * 8 + rows * 8;
}

// How integers that stand in for floats are made and multiplied: as digits in the order of the
// weight's codes, or as pairs of rows. False of `make`: integers hold the token badly.
struct StandInBodies {
  bool (*make)(const K16Weight&, const void* x, Element type, const TokenIntegers&);
  void (*product)(const K16Weight&, const StandInTask&);
  // Of pairs: with fewer tokens digits are faster, of codes of 4 and of 8 bits.
  int64_t least_tokens = 0;
  int64_t least_tokens_of_bytes = 0;
};

// A token of INT8 by blocks of 128 rows, which are in the order of a weight's codes where its
// groups are whole blocks.
struct QuadToken {
  int8_t* values = nullptr;  // [blocks][128]
  int32_t* sums = nullptr;   // [groups]
};

// y[m, n] = x_scale[m] * (x @ W)[m, n] + bias[n] for tokens [0, rows), of integer codes of 4
// or 8 bits, groups of whole runs of 16 rows, or one, at most 2^16 rows in a group.
struct QuadTask {
  const int8_t* x = nullptr;       // [rows][blocks][128]
  const int32_t* sums = nullptr;   // [rows][groups]
  const float* x_scale = nullptr;  // [rows]
  int64_t rows = 0;                // at most kScaledRows
  int64_t tile_begin = 0;
  int64_t tile_end = 0;
  const float* bias = nullptr;  // [N] or null
  void* y = nullptr;            // row 0, column 0 of the whole result
  int64_t y_stride = 0;         // elements
  Element y_type = Element::kFp16;
  // 64-byte aligned; of scaled_scratch_bytes, and at least of 3 * groups * 8 floats.
  void* scratch = nullptr;
};
struct QuadBodies {
  void (*order)(const K16Weight&, const int8_t* x, const QuadToken&);
  void (*product)(const K16Weight&, const QuadTask&);
  bool any_groups;  // else of whole blocks of 128 rows, or one
  // With more tokens IntegerBodies' scaled product is faster, of codes of 4 and of 8 bits.
  int64_t most_tokens = kEver;
  int64_t most_tokens_of_bytes = kEver;

  static constexpr int64_t kEver = int64_t{1} << 62;
};

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
  IntegerBodies integers;
  // Least and greatest finite element; of none, +infinity and -infinity.
  void (*kv4_ranges)(const Kv4Rows&, const void* x, float* min, float* max);
  void (*kv4_codes)(const Kv4Rows&, const void* x, const float* inverse, const float* zero,
                    uint8_t* codes);
  void (*kv4_elements)(const Kv4Rows&, const uint8_t* codes, const Kv4Decoding&, void* out);
};

extern const Bodies kPortableBodies;
// Only in builds for x86-64.
extern const Bodies kAvx2Bodies;
extern const Bodies kAvx512Bodies;
extern const IntegerBodies kAvxVnniBodies;
extern const StandInBodies kAvx2Digits;
extern const StandInBodies kAvxVnniDigits;
extern const StandInBodies kAvx512Digits;
extern const StandInBodies kAvx2Pairs;
extern const StandInBodies kAvxVnniPairs;
extern const StandInBodies kAvx512Pairs;
extern const QuadBodies kAvx2Quads;
extern const QuadBodies kAvxVnniQuads;
extern const QuadBodies kAvx512Quads;
extern const IntegerBodies kAvx512VnniBodies;
extern const StandInBodies kAvx512VnniDigits;
extern const StandInBodies kAvx512VnniPairs;
extern const QuadBodies kAvx512VnniQuads;
// Few tokens, and the rest of integers, are those of AVX-512 VNNI.
extern const StandInBodies kAmxDigits;
extern const QuadBodies kAmxQuads;
// Only in builds for aarch64.
extern const Bodies kNeonBodies;
extern const StandInBodies kNeonDotDigits;
extern const QuadBodies kNeonDotQuads;

}  // namespace awqd::cpu
