// Bodies: the inner loops of the CPU rows, one table of them per instruction set.
//
// The sources behind a table are compiled with flags that other machines cannot run. So this header
// names plain types only: an inline function of a shared header, compiled there, could be the copy
// that the linker keeps for everybody.
#pragma once

#include <cstdint>

namespace awqd::cpu {

enum class Element : uint8_t { kFp16, kBf16, kFp32 };

// A weight in layout k16 (kernels/layouts/k16.h), as pointers and counts.
struct K16Weight {
  const uint32_t* codes = nullptr;  // [tiles][blocks][8][16]
  const uint8_t* scales = nullptr;  // [tiles][groups][8] of scale_type
  const uint8_t* zeros = nullptr;   // [tiles][groups][8]; null: `zero` everywhere
  float zero = 0;
  Element scale_type = Element::kFp16;  // kFp16 or kBf16
  int64_t k = 0;
  int64_t n = 0;
  int64_t group_size = 0;
  int64_t groups = 0;
  int64_t runs_per_group = 0;
  int64_t blocks = 0;
};

// y[0:rows, 8 tile_begin : 8 tile_end] = x @ W + bias.
struct ProductTask {
  const float* x = nullptr;  // [rows, padded K]; padding rows of groups hold 0
  int64_t x_stride = 0;      // floats
  int64_t rows = 0;
  int64_t tile_begin = 0;
  int64_t tile_end = 0;
  const float* bias = nullptr;  // [N] or null
  void* y = nullptr;            // row 0, column 0 of the whole result
  int64_t y_stride = 0;         // elements
  Element y_type = Element::kFp16;
  float* scratch = nullptr;  // of scratch_floats(w), 64-byte aligned
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

struct Bodies {
  void (*product)(const K16Weight&, const ProductTask&);
  int64_t (*scratch_floats)(const K16Weight&);
  void (*dequantize)(const K16Weight&, const DequantizeTask&);
  // Columns of one tile, each K floats long and `stride` floats apart, for a dense product. May
  // write up to 16 floats past the end of a column.
  void (*columns)(const K16Weight&, int64_t tile, float* out, int64_t stride);
  void (*to_float)(const void* in, Element type, int64_t count, float* out);
  // out[i] = round(in[i] + bias[i]); bias may be null.
  void (*from_float)(const float* in, const float* bias, int64_t count, Element type, void* out);
};

extern const Bodies kPortableBodies;
// Only in builds for x86-64.
extern const Bodies kAvx2Bodies;
extern const Bodies kAvx512Bodies;

}  // namespace awqd::cpu
