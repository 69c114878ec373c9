// Invented devices for tests of host arithmetic.
#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace awqd::cuda {

inline DeviceInfo Gpu(int arch, int sms, int64_t shared_bytes) {
  DeviceInfo out;
  out.kind = DeviceKind::kCuda;
  out.arch = arch;
  out.sm_count = sms;
  out.shared_bytes_per_block = shared_bytes;
  return out;
}

inline DeviceInfo H100() { return Gpu(90, 132, 232448); }

}  // namespace awqd::cuda
