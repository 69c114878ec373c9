// The rows of this folder, one function per source file.
#pragma once

#include "kernels/registry.h"

namespace awqd::cuda {

const KernelRow& DequantizeW4();
const KernelRow& QMatmulA16W4();
const KernelRow& PlainDequantizeRow();
const KernelRow& PlainMatmulRow();

}  // namespace awqd::cuda
