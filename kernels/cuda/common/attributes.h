// Launch attributes of the kernels: clusters, and starts that overlap the kernel before.
#pragma once

#include <cuda_runtime.h>

#include "kernels/types.h"

namespace awqd::cuda {

// Launch attributes. A kernel launched with them must call WaitForEarlierKernels in every block
// before it touches anything but weights. Empty below sm_90.
struct Attributes {
  cudaLaunchAttribute list[2];
  int count = 0;
};

// `cluster`: blocks along x that share memory; 1 for none.
inline Attributes OverlappedLaunch(const DeviceInfo& device, int cluster = 1) {
  Attributes out;
  if (device.arch < 90) return out;
  if (cluster > 1) {
    out.list[out.count].id = cudaLaunchAttributeClusterDimension;
    out.list[out.count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  out.list[out.count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  out.list[out.count++].val.programmaticStreamSerializationAllowed = 1;
  return out;
}

}  // namespace awqd::cuda
