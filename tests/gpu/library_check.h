// Check of what a call returned, as CUDA, libawqd and the kernels say it.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "kernels/library/awqd.h"

namespace awqd {

inline void Check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }
inline void Check(int code) { ASSERT_EQ(code, AWQD_OK) << awqd_error_message(); }
inline void Check(const absl::Status& status) { ASSERT_TRUE(status.ok()) << status; }

}  // namespace awqd
