// cpu/kv4: KV4's store and load (kernels/kv4.h). Rows are cut into tasks for the pool's threads; a
// task goes over a few rows at a time, first for their scales, then for their codes, while they are
// in the L1 cache. Any head_dim. The loops over elements are in bodies/kv4_body.h.
#include "kernels/kv4.h"

#include <algorithm>

#include "kernels/backends.h"
#include "kernels/base/math.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/rows.h"
#include "kernels/kv4_math.h"

namespace awqd {
namespace {

// Elements of a task: fewer are not worth another thread.
constexpr int64_t kPerTask = int64_t{1} << 15;
// Rows that go through the steps of a store or a load together.
constexpr int64_t kRows = 16;
// Results of this size leave the caches before anybody reads them.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

// Calls fn(first row, rows) for blocks of at most kRows.
template <typename Fn>
void ForEachBlock(const Kv4Shape& shape, Device& device, Fn fn) {
  const int64_t blocks = CeilDiv(shape.rows(), kRows);
  CpuDevice::Of(&device).pool().ForEachRow(blocks, kRows * shape.head_dim, kPerTask,
                                           [&](int64_t block) {
                                             const int64_t begin = block * kRows;
                                             fn(begin, std::min(kRows, shape.rows() - begin));
                                           });
}

// Scales, zeros, or what is made of them, of a block of rows.
struct Block {
  float scale[kRows], zero[kRows];
};

// Elements [begin, begin + count) by rows of an array of scales or zeros.
void ReadScales(const Kv4Shape& shape, Kv4Per per, const void* from, DType dtype,
                const cpu::Bodies& bodies, int64_t begin, int64_t count, float* out) {
  if (per == Kv4Per::kRow) {
    const char* const at = static_cast<const char*>(from) + begin * SizeOf(dtype);
    return bodies.to_float(at, cpu::ElementOf(dtype), count, out);
  }
  for (int64_t i = 0; i < count; ++i) {
    out[i] = LoadElement(from, dtype, per == Kv4Per::kHead ? (begin + i) % shape.heads : 0);
  }
}

// Rounds to FP16 where the type says so.
void RoundTo(DType dtype, const cpu::Bodies& bodies, int64_t count, float* values) {
  if (dtype != DType::kFp16) return;
  uint16_t halves[kRows];
  bodies.from_float(values, nullptr, count, cpu::Element::kFp16, halves);
  bodies.to_float(halves, cpu::Element::kFp16, count, values);
}

void WriteScales(const float* values, DType dtype, const cpu::Bodies& bodies, int64_t begin,
                 int64_t count, void* out) {
  char* const at = static_cast<char*>(out) + begin * SizeOf(dtype);
  bodies.from_float(values, nullptr, count, cpu::ElementOf(dtype), at);
}

// kv4::ScaleOf of each row. All rows at once: one by one the roundings and quotients take longer
// than all of a row's elements.
void ComputeScales(const float* min, const float* max, DType dtype, const cpu::Bodies& bodies,
                   int64_t count, Block* out) {
  const kv4::ScaleLimits limits = kv4::LimitsOf(dtype == DType::kFp16);
  for (int64_t i = 0; i < count; ++i) {
    const kv4::RowScale row = kv4::ScaleBeforeRounding({min[i], max[i]}, limits);
    out->scale[i] = row.scale;
    out->zero[i] = row.zero;
  }
  RoundTo(dtype, bodies, count, out->scale);
  RoundTo(dtype, bodies, count, out->zero);
  for (int64_t i = 0; i < count; ++i) {
    if (!kv4::IsSpecial({min[i], max[i]}, out->zero[i])) continue;
    const auto round = [&](float value) {
      RoundTo(dtype, bodies, 1, &value);
      return value;
    };
    const kv4::RowScale row = kv4::SpecialScale({min[i], max[i]}, limits, round);
    out->scale[i] = row.scale;
    out->zero[i] = row.zero;
  }
}

// Scales and zeros of a block of rows: computed and written, or the caller's.
void BlockScales(const Kv4StoreArgs& args, const cpu::Bodies& bodies, const cpu::Kv4Rows& rows,
                 const void* x, int64_t begin, Block* out) {
  const DType dtype = args.scale_dtype;
  if (args.per != Kv4Per::kRow) {
    ReadScales(args.shape, args.per, args.given_scale, dtype, bodies, begin, rows.rows, out->scale);
    ReadScales(args.shape, args.per, args.given_zero, dtype, bodies, begin, rows.rows, out->zero);
    return;
  }
  float min[kRows], max[kRows];
  bodies.kv4_ranges(rows, x, min, max);
  ComputeScales(min, max, dtype, bodies, rows.rows, out);
  WriteScales(out->scale, dtype, bodies, begin, rows.rows, args.scale);
  WriteScales(out->zero, dtype, bodies, begin, rows.rows, args.zero);
}

absl::Status Store(const Kv4StoreArgs& args, Device& device, StreamView) {
  const cpu::Bodies& bodies = cpu::BodiesFor(device.info().isa);
  const int64_t row_bytes = args.shape.head_dim * SizeOf(args.x_dtype);
  ForEachBlock(args.shape, device, [&](int64_t begin, int64_t count) {
    const cpu::Kv4Rows rows = {count, args.shape.head_dim, cpu::ElementOf(args.x_dtype)};
    const char* const x = static_cast<const char*>(args.x) + begin * row_bytes;
    Block block;
    float inverse[kRows];
    BlockScales(args, bodies, rows, x, begin, &block);
    for (int64_t i = 0; i < count; ++i) inverse[i] = kv4::Div(1, block.scale[i]);
    bodies.kv4_codes(rows, x, inverse, block.zero, args.codes + begin * args.shape.row_bytes());
  });
  return absl::OkStatus();
}

absl::Status Load(const Kv4LoadArgs& args, Device& device, StreamView) {
  const cpu::Bodies& bodies = cpu::BodiesFor(device.info().isa);
  const int64_t row_bytes = args.shape.head_dim * SizeOf(args.out_dtype);
  const bool fused = args.form == Kv4Form::kFused;
  const bool stream = args.shape.rows() * row_bytes >= kStreamBytes;
  ForEachBlock(args.shape, device, [&](int64_t begin, int64_t count) {
    const cpu::Kv4Rows rows = {count, args.shape.head_dim, cpu::ElementOf(args.out_dtype)};
    Block block;
    ReadScales(args.shape, args.per, args.scale, args.scale_dtype, bodies, begin, count,
               block.scale);
    ReadScales(args.shape, args.per, args.zero, args.scale_dtype, bodies, begin, count, block.zero);
    if (fused) {
      for (int64_t i = 0; i < count; ++i) {
        block.zero[i] = kv4::OffsetOf(block.scale[i], block.zero[i]);
      }
      RoundTo(DType::kFp16, bodies, count, block.zero);
      RoundTo(DType::kFp16, bodies, count, block.scale);
    }
    bodies.kv4_elements(rows, args.codes + begin * args.shape.row_bytes(),
                        {block.scale, block.zero, fused, stream},
                        static_cast<char*>(args.out) + begin * row_bytes);
  });
  return absl::OkStatus();
}

}  // namespace

const Kv4Ops& CpuKv4() {
  static const Kv4Ops ops = {"cpu/kv4", Store, Load};
  return ops;
}

}  // namespace awqd
