// 16 floats in four 16-byte vectors of the compiler: the vector that the bodies are written over.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/base/float8.h"
#include "kernels/base/half.h"
#include "kernels/cpu/bodies/bodies.h"

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

// Whether 8 scales are such that products with integers below 256 are normal halves.
inline bool Ordinary(const float* scales) {
  for (int i = 0; i < 8; ++i) {
    const float size = scales[i] < 0 ? -scales[i] : scales[i];
    if (!(size >= 0x1p-14f && size <= 128)) return false;
  }
  return true;
}

inline void StreamFence() {}

// out[i * stride + c] = in[c * in_stride + i] for 8 columns of 16 elements.
template <typename T>
void Transpose(const T* in, int64_t in_stride, T* out, int64_t stride) {
  for (int c = 0; c < 8; ++c) {
    for (int i = 0; i < 16; ++i) out[i * stride + c] = in[c * in_stride + i];
  }
}
inline void TransposeTile(const uint32_t* in, uint32_t* out, int64_t stride) {
  Transpose(in, 16, out, stride);
}
inline void TransposeTileOfBytes(const uint8_t* in, int64_t in_stride, uint8_t* out,
                                 int64_t stride) {
  Transpose(in, in_stride, out, stride);
}

struct Vec {
  typedef float Quad __attribute__((vector_size(16)));
  struct F {
    Quad q[4];
  };
  static constexpr int kRows = 1;
  // Tiles of more sums than this leave no registers for tables and codes.
  static constexpr int kRoomySums = 0;
  static constexpr int kColumns = 2;
  // A decoded vector costs sixteen look-ups: rows share it through memory.
  static constexpr bool kUsePanel = true;
  // Whether shifts that the compiler knows are worth their code.
  static constexpr bool kUnroll = false;
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
  static F Fms(const F& a, const F& b, const F& c) { return Sub(Mul(a, b), c); }
  static F Sub(const F& a, const F& b) {
    F out;
    for (int i = 0; i < 4; ++i) out.q[i] = a.q[i] - b.q[i];
    return out;
  }
  static F Mul(const F& a, const F& b) {
    F out;
    for (int i = 0; i < 4; ++i) out.q[i] = a.q[i] * b.q[i];
    return out;
  }
  static F Set(float v) {
    return Each([v](int) { return v; });
  }
  static F RoundToHalf(const F& v) {
    return Each([&](int i) { return HalfToFloat(FloatToHalf(v.q[i / 4][i % 4])); });
  }
  template <typename Of>
  static F Each(Of of) {
    float out[16];
    for (int i = 0; i < 16; ++i) out[i] = of(i);
    return Load(out);
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

  // table[words[i] >> shift], whose low 4 bits are the index.
  static F Lookup(const F& table, const uint32_t* words, int shift) {
    const float* entries = reinterpret_cast<const float*>(&table);
    return Each([&](int i) { return entries[words[i] >> shift & 15]; });
  }
  template <int kShift>
  static F LookupAt(const F& table, const uint32_t* words) {
    return Lookup(table, words, kShift);
  }
  // 2^23 + (words[i] >> shift & mask).
  static F Magic(const uint32_t* words, int shift, int mask) {
    uint32_t bits[16];
    for (int i = 0; i < 16; ++i) {
      bits[i] = (words[i] >> shift & static_cast<uint32_t>(mask)) | 0x4b000000u;
    }
    F out;
    std::memcpy(&out, bits, sizeof(out));
    return out;
  }
  static F Signed(const uint8_t* bytes) {
    return Each([&](int i) { return static_cast<float>(static_cast<int8_t>(bytes[i])); });
  }
  // The bytes have their upper bit flipped.
  static F Flipped(const uint8_t* bytes) {
    return Each([&](int i) { return static_cast<float>(bytes[i] ^ 0x80); });
  }
  // 2^-8 of each.
  static F E4m3(const uint8_t* bytes) {
    return Each([&](int i) { return E4m3ToFloat(bytes[i]) * 0x1p-8f; });
  }
  static void WidenLanes(const uint8_t* block, int bits, uint32_t* words) {
    for (int i = 0; i < 16; ++i) {
      words[i] = bits == 1 ? block[i] : block[2 * i] | block[2 * i + 1] << 8;
      if (bits == 3) words[i] |= static_cast<uint32_t>(block[32 + i]) << 16;
    }
  }

  static void Stream32(const F& a, const F& b, Element type, void* out) {
    float v[32];
    Store(v, a);
    Store(v + 16, b);
    for (int i = 0; i < 32; i += 8) Store8Plus(out, type, i, v + i, nullptr);
  }
};

}  // namespace
}  // namespace awqd::cpu
