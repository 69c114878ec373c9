// The rows of this folder, one function per source file.
#pragma once

#include "kernels/registry.h"

namespace awqd::cuda {

const KernelRow& DequantizeRow();
const KernelRow& QMatmulA16();
const KernelRow& ScaledSumsA16();
const KernelRow& QMatmulA8();
const KernelRow& QMatmulA8Scaled();
const KernelRow& QMatmulGrouped();
const KernelRow& PlainDequantizeRow();
const KernelRow& PlainMatmulRow();
const KernelRow& PlainQMatmulA8Row();
const KernelRow& PlainQMatmulA8ScaledRow();

}  // namespace awqd::cuda
