// 16 floats in four 16-byte vectors of the compiler: the vector that body.h is written over.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/base/half.h"
#include "kernels/cpu/bodies.h"

namespace awqd::cpu {
namespace {

inline float Load1(const void* in, Element type, int64_t index) {
  if (type == Element::kFp32) return static_cast<const float*>(in)[index];
  const uint16_t bits = static_cast<const uint16_t*>(in)[index];
  return type == Element::kFp16 ? HalfToFloat(bits) : Bf16ToFloat(bits);
}

inline void Store1(void* out, Element type, int64_t index, float value) {
  if (type == Element::kFp32) {
    static_cast<float*>(out)[index] = value;
  } else {
    static_cast<uint16_t*>(out)[index] =
        type == Element::kFp16 ? FloatToHalf(value) : FloatToBf16(value);
  }
}

inline void Load8To(const void* in, Element type, int64_t index, float* out) {
  for (int i = 0; i < 8; ++i) out[i] = Load1(in, type, index + i);
}

inline void Store8Plus(void* out, Element type, int64_t index, const float* v, const float* bias) {
  for (int i = 0; i < 8; ++i) {
    Store1(out, type, index + i, bias != nullptr ? v[i] + bias[i] : v[i]);
  }
}

inline void Zeros8(const uint8_t* in, float* out) {
  for (int i = 0; i < 8; ++i) out[i] = in[i];
}

inline void StreamFence() {}

struct Vec {
  typedef float Quad __attribute__((vector_size(16)));
  struct F {
    Quad q[4];
  };
  struct Table {
    float entry[16];
  };
  static constexpr int kRows = 1;
  // Tiles of more sums than this leave no registers for tables and codes.
  static constexpr int kRoomySums = 0;
  static constexpr int kColumns = 2;
  // A decoded vector costs sixteen look-ups: rows share it through memory.
  static constexpr bool kUsePanel = true;
  static constexpr int Columns(int) { return kColumns; }

  static F Zero() { return {}; }
  static F Load(const float* p) {
    F out;
    std::memcpy(&out, p, sizeof(out));
    return out;
  }
  static void Store(float* p, const F& v) { std::memcpy(p, &v, sizeof(v)); }
  static F Fma(const F& a, const F& b, const F& c) {
    F out;
    for (int i = 0; i < 4; ++i) out.q[i] = a.q[i] * b.q[i] + c.q[i];
    return out;
  }
  using Part = Quad;
  static constexpr int kParts = 4;
  template <int kPart>
  static Part LoadPart(const float* p) {
    Part out;
    std::memcpy(&out, p + kPart * 4, sizeof(out));
    return out;
  }
  template <int kPart>
  static void FmaPart(Part a, Part b, F* c) {
    c->q[kPart] = a * b + c->q[kPart];
  }

  template <int kCount>
  static void Sums(const F* v, float* out) {
    for (int i = 0; i < kCount; ++i) {
      const Quad four = (v[i].q[0] + v[i].q[2]) + (v[i].q[1] + v[i].q[3]);
      out[i] = (four[0] + four[2]) + (four[1] + four[3]);
    }
  }

  static Table MakeTable(float scale, float zero, bool round_to_half) {
    Table out;
    for (int q = 0; q < 16; ++q) {
      const float w = (static_cast<float>(q) - zero) * scale;
      out.entry[q] = round_to_half ? HalfToFloat(FloatToHalf(w)) : w;
    }
    return out;
  }
  // Tables of 8 columns.
  static void MakeTables(const float* scales, const uint8_t* zeros, bool round_to_half,
                         Table* tables) {
    for (int c = 0; c < 8; ++c) tables[c] = MakeTable(scales[c], zeros[c], round_to_half);
  }
  static F Lookup(const Table& table, const uint32_t* words, int j) {
    F out;
    for (int i = 0; i < 16; ++i) out.q[i / 4][i % 4] = table.entry[words[i] >> (4 * j) & 15];
    return out;
  }
  template <int kRun>
  static F LookupAt(const Table& table, const uint32_t* words) {
    return Lookup(table, words, kRun);
  }

  // (q - z) * s of 16 columns of one row; `magic_zeros` hold 2^23 + z.
  static F Weights(const uint32_t* words, int j, const float* scales, const float* magic_zeros) {
    F out;
    for (int i = 0; i < 16; ++i) {
      const float q = static_cast<float>(0x800000u + (words[i] >> (4 * j) & 15));
      out.q[i / 4][i % 4] = (q - magic_zeros[i]) * scales[i];
    }
    return out;
  }

  static void Stream32(const F& a, const F& b, Element type, void* out) {
    float v[32];
    Store(v, a);
    Store(v + 16, b);
    for (int i = 0; i < 32; i += 8) Store8Plus(out, type, i, v + i, nullptr);
  }

  // out[i * stride + c] = in[c * 16 + i] for 8 columns of 16 words.
  static void Transpose(const uint32_t* in, uint32_t* out, int64_t stride) {
    for (int c = 0; c < 8; ++c) {
      for (int i = 0; i < 16; ++i) out[i * stride + c] = in[c * 16 + i];
    }
  }
};

}  // namespace
}  // namespace awqd::cpu
