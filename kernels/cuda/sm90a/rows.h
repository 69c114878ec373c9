// The rows of this folder, one function per source file.
#pragma once

#include "kernels/registry.h"

namespace awqd::cuda {

const KernelRow& PersistentA16W4Row();
const KernelRow& ChainedA16W4Row();

}  // namespace awqd::cuda
