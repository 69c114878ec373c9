// What the fast CPU rows share: the weight as pointers, the bodies of a device, element types.
#pragma once

#include "kernels/cpu/bodies.h"
#include "kernels/cpu/device.h"
#include "kernels/registry.h"

namespace awqd::cpu {

// Scheme bits that layout k16 holds, as a row's bits_mask.
inline constexpr uint32_t kK16Bits = 0b11110;

// The bodies for an instruction set that this build has.
const Bodies& BodiesFor(CpuIsa isa);

// A weight whose layout is k16.
K16Weight AccessK16(const DeviceWeight& weight);
// The same without pointers, for sizing scratch.
K16Weight DescribeK16(const WeightShape& shape);

// FP16, BF16 or FP32.
Element ElementOf(DType dtype);

// The fields that every fast row has alike.
KernelRow FastRow(absl::string_view name, Op op);

// Writes `rows` rows of x from `row_begin` as FP32, `stride` floats apart, with the groups padded
// as in the layout when `padded`, else as they are.
void ExpandRows(const ConstMatrixView& x, int64_t row_begin, int64_t rows, const K16Weight& weight,
                bool padded, int64_t stride, float* out, CpuDevice& device);

}  // namespace awqd::cpu
