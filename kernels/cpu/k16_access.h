// What the fast CPU rows share: the weight as pointers, the bodies of a device, element types.
#pragma once

#include "kernels/cpu/bodies/bodies.h"
#include "kernels/cpu/device.h"
#include "kernels/registry.h"

namespace awqd::cpu {

// The bodies for an instruction set that this build has.
const Bodies& BodiesFor(CpuIsa isa);
// Those of products of integers. Their scratch is that of the instruction set.
const IntegerBodies& IntegerBodiesFor(CpuIsa isa);

// Those of activations as integers, of FP16 and BF16 few tokens and many; null where there are
// none.
const StandInBodies* DigitBodiesFor(CpuIsa isa);
const StandInBodies* PairBodiesFor(CpuIsa isa);
const QuadBodies* QuadBodiesFor(CpuIsa isa);

// A weight whose layout is k16.
K16Weight AccessK16(const DeviceWeight& weight);
// The same without pointers, for sizing scratch.
K16Weight DescribeK16(const WeightShape& shape);

// Tiles of a task of a product by panels (bodies/integers/panel.h): whole panels, some tasks a thread, each
// long enough that what comes next is fetched meanwhile.
int64_t TilesOfPanelTask(const K16Weight& weight, int64_t threads);

// FP16, BF16 or FP32.
Element ElementOf(DType dtype);

// Multiplies a row of x by a power of two, if its partial sums could pass FP32 although the exact
// sums do not. Returns what its sums are to be multiplied by; 1 for almost every row.
float ScaleDownHugeRow(float* row, int64_t count);

// Writes `rows` rows of x from `row_begin` as FP32, `stride` floats apart, with the groups padded
// as in the layout when `padded`, else as they are. ScaleDownHugeRow's answers go to `factors`,
// [rows]; returns whether any is not 1.
bool ExpandRows(const ConstMatrixView& x, int64_t row_begin, int64_t rows, const K16Weight& weight,
                bool padded, int64_t stride, float* out, float* factors, CpuDevice& device);

// One token of INT8 as the integer products read it: 16 bits an element, the groups padded with
// zeros as in the layout. `out`: [weight.blocks * 128].
void WidenToken(const K16Weight& weight, const int8_t* x, int16_t* out);

}  // namespace awqd::cpu
