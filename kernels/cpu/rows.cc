// From a weight in layout k16 to what the bodies take.
#include "kernels/cpu/rows.h"

#include <algorithm>
#include <array>
#include <bit>

#include "kernels/exact.h"
#include "kernels/layouts/k16.h"

namespace awqd::cpu {
namespace {

// Elements, about 10 us of work: fewer are not worth another thread.
constexpr int64_t kExpandedPerTask = int64_t{1} << 16;

using ByteValues = std::array<float, 256>;

ByteValues MakeValues(DType dtype) {
  ByteValues out;
  for (int i = 0; i < 256; ++i) {
    const auto bits = static_cast<uint8_t>(i);
    out[i] = LoadElement(&bits, dtype, 0);
  }
  return out;
}

// The values of scales of one byte; null for other types.
const float* ValuesOf(DType dtype) {
  static const ByteValues e4m3 = MakeValues(DType::kE4m3), e8m0 = MakeValues(DType::kE8m0),
                          int8 = MakeValues(DType::kInt8);
  if (dtype == DType::kE4m3) return e4m3.data();
  if (dtype == DType::kE8m0) return e8m0.data();
  return dtype == DType::kInt8 ? int8.data() : nullptr;
}

}  // namespace

const Bodies& BodiesFor(CpuIsa isa) {
#if defined(AWQD_CPU_X86)
  if (isa >= CpuIsa::kAvx512) return kAvx512Bodies;
  if (isa >= CpuIsa::kAvx2) return kAvx2Bodies;
#elif defined(AWQD_CPU_ARM64)
  if (isa >= CpuIsa::kNeon) return kNeonBodies;
#endif
  (void)isa;
  return kPortableBodies;
}

const IntegerProducts& IntegersFor(CpuIsa isa) {
  switch (isa) {
#if defined(AWQD_CPU_X86)
    case CpuIsa::kAvx2:
      return kAvx2Integers;
    case CpuIsa::kAvxVnni:
      return kAvxVnniIntegers;
    case CpuIsa::kAvx512:
      return kAvx512Integers;
    case CpuIsa::kAvx512Vnni:
      return kAvx512VnniIntegers;
    case CpuIsa::kAmx: {
      static const IntegerProducts amx = [] {
        IntegerProducts products = kAvx512VnniIntegers;
        products.int16_lanes = {};
        products.int16_panels = kAmxInt16;
        products.int8_bytes = kAmxInt8;
        return products;
      }();
      return amx;
    }
#elif defined(AWQD_CPU_ARM64)
    case CpuIsa::kNeon:
      return kNeonIntegers;
    case CpuIsa::kNeonDot: {
      static const IntegerProducts dot = [] {
        IntegerProducts products = kNeonIntegers;
        products.int16_columns = kNeonDotInt16;
        products.int8_bytes = kNeonDotInt8;
        return products;
      }();
      return dot;
    }
#endif
    default:
      return kPortableIntegers;
  }
}

Element ElementOf(DType dtype) {
  if (SizeOf(dtype) == 1) return Element::kByte;
  if (dtype == DType::kInt32) return Element::kInt32;
  if (dtype == DType::kFp32) return Element::kFp32;
  return dtype == DType::kFp16 ? Element::kFp16 : Element::kBf16;
}

K16Weight DescribeK16(const WeightShape& shape) {
  const QuantizationScheme& d = shape.scheme;
  const K16Shape k16(shape);
  K16Weight out;
  out.code = d.code == CodeKind::kE4m3 ? Code::kE4m3
             : d.is_integer()          ? Code::kInteger
                                       : Code::kValue;
  out.zero = static_cast<float>(d.zero_kind == ZeroKind::kConstant ? d.zero : 0);
  out.zero_type = d.real_zeros() ? ElementOf(d.zero_dtype) : Element::kByte;
  out.zero_bytes = d.real_zeros() ? static_cast<int>(SizeOf(d.zero_dtype)) : 1;
  out.zero_after = d.zero_kind == ZeroKind::kRealAfter;
  out.scale_type = Element::kByte;
  if (d.scale_dtype) {
    out.scale_type = ElementOf(*d.scale_dtype);
    out.scale_values = ValuesOf(*d.scale_dtype);
    out.scale_bytes = static_cast<int>(SizeOf(*d.scale_dtype));
  }
  out.round_to_half = d.is_integer() && !d.real_zeros() && d.scale_dtype == DType::kFp16 &&
                      d.outer == OuterKind::kNone && !shape.large_scales;
  out.integers = !d.real_zeros() && d.scale_dtype.value_or(DType::kInt8) == DType::kInt8;
  out.scale_sums = k16.bits == 8 && k16.groups == 1 && d.zero_kind == ZeroKind::kConstant &&
                   d.zero == (d.is_integer() ? 128 : 0);
  out.bits = k16.bits;
  out.block_bytes = k16.block_bytes();
  out.k = shape.k;
  out.n = shape.n;
  out.group_size = shape.group_rows();
  out.groups = k16.groups;
  out.runs_per_group = k16.runs_per_group;
  out.runs = k16.runs;
  out.tiles = k16.tiles;
  out.blocks = k16.blocks;
  return out;
}

K16Weight AccessK16(const DeviceWeight& weight) {
  const QuantizationScheme& d = weight.shape.scheme;
  K16Weight out = DescribeK16(weight.shape);
  out.codes = weight.codes();
  out.scales = weight.scales();
  out.zeros = weight.zeros();
  out.outer = weight.outer();
  for (int i = 0; i < 16; ++i) {
    out.values[i] = DecodeCode(d.code, weight.table(), i & ((1 << d.bits) - 1));
  }
  return out;
}

float ScaleDownHugeRow(float* row, int64_t count) {
  // Times weights of up to 2^24 and a K of 2^23, products of what is left stay below 2^127.
  constexpr int32_t kHuge = std::bit_cast<int32_t>(0x1p80f), kInfinity = 0x7f800000;
  int32_t largest = 0;  // the bits of magnitudes are ordered as these are
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::bit_cast<int32_t>(row[i]) & 0x7fffffff);
  }
  if (largest < kHuge || largest >= kInfinity) return 1;
  for (int64_t i = 0; i < count; ++i) row[i] *= 0x1p-64f;
  return 0x1p64f;
}

bool ExpandRows(const ConstMatrixView& x, int64_t row_begin, int64_t rows, const K16Weight& weight,
                bool padded, int64_t stride, float* out, float* factors, CpuDevice& device) {
  const Bodies& bodies = BodiesFor(device.info().isa);
  const Element type = ElementOf(x.dtype);
  const int64_t size = SizeOf(x.dtype);
  // Rows that lie together, and floats from one such piece to the next.
  const bool whole = !padded || weight.group_size % K16Shape::kRun == 0;
  const int64_t piece = whole ? x.cols : weight.group_size;
  const int64_t step = whole ? x.cols : weight.runs_per_group * K16Shape::kRun;
  const int64_t end = padded ? weight.runs * K16Shape::kRun : x.cols;
  device.pool().ForEachRow(rows, x.cols, kExpandedPerTask, [&](int64_t m) {
    const char* in = static_cast<const char*>(x.data) + (row_begin + m) * x.cols * size;
    float* const to = out + m * stride;
    int64_t at = 0;
    for (int64_t k = 0; k < x.cols; k += piece, at += step) {
      const int64_t count = std::min(piece, x.cols - k);
      bodies.to_float(in + k * size, type, count, to + at);
      std::fill(to + at + count, to + std::min(at + step, end), 0.0f);
    }
    std::fill(to + std::min(at, end), to + end, 0.0f);
    factors[m] = type == Element::kFp16 ? 1 : ScaleDownHugeRow(to, std::min(at, end));
  });
  return std::any_of(factors, factors + rows, [](float factor) { return factor != 1; });
}

}  // namespace awqd::cpu
