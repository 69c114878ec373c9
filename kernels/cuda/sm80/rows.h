// The rows of this folder, one function per source file.
#pragma once

#include "kernels/registry.h"

namespace awqd::cuda {

const KernelRow& DequantizeRow();
const KernelRow& QMatmulA16();
const KernelRow& ScaledSumsA16();
const KernelRow& QMatmulA8();
const KernelRow& QMatmulA8Scaled();
const KernelRow& QMatmulFloat8();
const KernelRow& QMatmulGrouped();
const KernelRow& PlainDequantizeRow();
const KernelRow& PlainMatmulRow();
const KernelRow& PlainQMatmulA8Row();
const KernelRow& PlainQMatmulA8ScaledRow();
const KernelRow& VectorsDequantizeRow();
const KernelRow& VectorsMatmulRow();
const KernelRow& VectorsGroupedRow();
const KernelRow& TrellisDequantizeRow();
const KernelRow& TrellisMatmulRow();

// The product of ScaledSumsA16 by sm80/stream_k.cuh on so many blocks, for tests whether that is
// chosen or not. At most as many as multiprocessors and as records; compute capability 9.0 and
// later. The workspace has room for kMostTokensOfScaledSums x 64 floats for each block.
absl::Status RunStreamKScaledSums(const MatmulArgs& args, int blocks, StreamView stream);

}  // namespace awqd::cuda
