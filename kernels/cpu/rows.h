// The CPU rows but for the reference, and what the fast ones share: the weight as pointers, the
// bodies of a device, element types.
#pragma once

#include "kernels/cpu/bodies/bodies.h"
#include "kernels/cpu/device.h"
#include "kernels/registry.h"

namespace awqd {

extern const KernelRow kCpuDequantize;         // cpu/dequantize
extern const KernelRow kCpuQmatmulA16;         // cpu/qmatmul_a16
extern const KernelRow kCpuQmatmulA16Pairs;    // cpu/qmatmul_a16_pairs
extern const KernelRow kCpuQmatmulA8;          // cpu/qmatmul_a8
extern const KernelRow kCpuQmatmulA8Scaled;    // cpu/qmatmul_a8_scaled
extern const KernelRow kCpuDense;              // cpu/dense
extern const KernelRow kCpuPlainDequantize;    // cpu/plain_dequantize
extern const KernelRow kCpuPlainMatmul;        // cpu/plain_matmul
extern const KernelRow kCpuVectorsDequantize;  // cpu/vectors_dequantize
extern const KernelRow kCpuVectorsMatmul;      // cpu/vectors_matmul
extern const KernelRow kCpuTrellisDequantize;  // cpu/trellis_dequantize
extern const KernelRow kCpuTrellisMatmul;      // cpu/trellis_matmul

namespace cpu {

// The body for an instruction set that this build has.
const Bodies& BodiesFor(CpuIsa isa);
// Its products of activations as integers.
const IntegerProducts& IntegersFor(CpuIsa isa);

// A weight whose layout is k16.
K16Weight AccessK16(const DeviceWeight& weight);
// The same without pointers, for sizing scratch.
K16Weight DescribeK16(const WeightShape& shape);

// Types of one byte are kByte.
Element ElementOf(DType dtype);

// Multiplies a row of x by a power of two, if its partial sums could pass FP32 although the exact
// sums do not. Returns what its sums are to be multiplied by; 1 for almost every row.
float ScaleDownHugeRow(float* row, int64_t count);

// Writes `rows` rows of x from `row_begin` as FP32, `stride` floats apart, with the groups padded
// as in the layout of `weight` when `padded`, else as they are. ScaleDownHugeRow's answers go to `factors`,
// [rows]; returns whether any is not 1.
bool ExpandRows(const ConstMatrixView& x, int64_t row_begin, int64_t rows, const K16Weight& weight,
                bool padded, int64_t stride, float* out, float* factors, CpuDevice& device);

}  // namespace cpu
}  // namespace awqd
