// Products on a CPU device of the test.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/backends.h"
#include "kernels/kernels.h"
#include "tests/testing/matchers.h"

namespace awqd {

// y for rows [first, first + m) of x, in FP32. `x_type`: type of x's elements.
inline std::vector<float> Product(const DeviceWeight& weight, Device& device,
                                  const std::vector<uint8_t>& x, int64_t first, int64_t m,
                                  DType x_type = DType::kFp16) {
  const int64_t k = weight.shape.k, n = weight.shape.n;
  std::vector<float> y(m * n);
  auto workspace =
      device.Allocate(MemoryKind::kDevice, WorkspaceBytes(weight, Path::kFused, m)).value();
  EXPECT_THAT(QuantizedMatmul({&weight,
                               {x.data() + first * k * SizeOf(x_type), x_type, m, k},
                               {y.data(), DType::kFp32, m, n},
                               nullptr,
                               workspace.data()},
                              Path::kFused, {}),
              testing::IsOk());
  return y;
}

// A device limited by AWQD_CPU_ISA=`isa`.
inline std::unique_ptr<Device> OpenCpuDeviceOf(const char* isa) {
  const char* const inherited = std::getenv("AWQD_CPU_ISA");
  const std::string restore = inherited == nullptr ? "" : inherited;
  EXPECT_EQ(setenv("AWQD_CPU_ISA", isa, 1), 0);
  auto device = OpenCpuDevice();
  EXPECT_EQ(setenv("AWQD_CPU_ISA", restore.c_str(), 1), 0);
  return device;
}

}  // namespace awqd
