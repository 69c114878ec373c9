// From a weight in layout k16 to what the bodies take.
#include "kernels/cpu/k16_access.h"

#include <algorithm>

#include "kernels/layouts/k16.h"

namespace awqd::cpu {
namespace {

// Elements, about 10 us of work: fewer are not worth another thread.
constexpr int64_t kExpandedPerTask = int64_t{1} << 16;

}  // namespace

const Bodies& BodiesFor(CpuIsa isa) {
#if defined(AWQD_CPU_X86)
  if (isa == CpuIsa::kAvx512) return kAvx512Bodies;
  if (isa == CpuIsa::kAvx2) return kAvx2Bodies;
#endif
  (void)isa;
  return kPortableBodies;
}

Element ElementOf(DType dtype) {
  if (dtype == DType::kFp32) return Element::kFp32;
  return dtype == DType::kFp16 ? Element::kFp16 : Element::kBf16;
}

K16Weight DescribeK16(const WeightShape& shape) {
  const K16Shape k16(shape);
  K16Weight out;
  out.zero = static_cast<float>(1 << (shape.scheme.bits - 1));
  out.scale_type = ElementOf(shape.scheme.scale_dtype);
  out.k = shape.k;
  out.n = shape.n;
  out.group_size = shape.scheme.group_size;
  out.groups = k16.groups;
  out.runs_per_group = k16.runs_per_group;
  out.blocks = k16.blocks;
  return out;
}

K16Weight AccessK16(const DeviceWeight& weight) {
  K16Weight out = DescribeK16(weight.shape);
  out.codes = reinterpret_cast<const uint32_t*>(weight.codes());
  out.scales = weight.scales();
  const bool stored = weight.shape.scheme.zero_kind == ZeroKind::kInteger;
  out.zeros = stored ? weight.zeros() : nullptr;
  return out;
}

KernelRow FastRow(absl::string_view name, Op op) {
  KernelRow row;
  row.name = name;
  row.op = op;
  row.device = DeviceKind::kCpu;
  row.bits_mask = kK16Bits;
  row.layout = &kK16Layout;
  row.priority = 10;
  return row;
}

void ExpandRows(const ConstMatrixView& x, int64_t row_begin, int64_t rows, const K16Weight& weight,
                bool padded, int64_t stride, float* out, CpuDevice& device) {
  const Bodies& bodies = BodiesFor(device.info().isa);
  const Element type = ElementOf(x.dtype);
  const int64_t size = SizeOf(x.dtype);
  const int64_t run = K16Shape::kRun;
  const bool whole = !padded || weight.group_size % run == 0;
  const int64_t piece = whole ? x.cols : weight.group_size;
  const int64_t step = whole ? x.cols : weight.runs_per_group * run;
  const auto expand = [&](int64_t m) {
    const char* in = static_cast<const char*>(x.data) + (row_begin + m) * x.cols * size;
    float* to = out + m * stride;
    for (int64_t k = 0; k < x.cols; k += piece, to += step) {
      bodies.to_float(in + k * size, type, piece, to);
      for (int64_t pad = piece; pad < step; ++pad) to[pad] = 0;
    }
  };
  const int64_t each = std::max<int64_t>(1, kExpandedPerTask / std::max<int64_t>(1, x.cols));
  device.pool().ParallelFor(CeilDiv(rows, each), [&](int64_t task, int) {
    for (int64_t m = task * each; m < std::min(rows, (task + 1) * each); ++m) expand(m);
  });
}

}  // namespace awqd::cpu
