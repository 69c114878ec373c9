// The mapping of CUDA errors, and the reasons why a machine has no usable GPU. Needs no GPU.
#include "kernels/cuda/core/error.h"

#include <cuda_runtime_api.h>

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "kernels/cuda/core/device.h"

namespace awqd::cuda {
namespace {

using ::testing::HasSubstr;

absl::StatusCode CodeOf(cudaError_t error) { return ToStatus(error, "call").code(); }

TEST(CudaErrorTest, SuccessIsOk) { EXPECT_TRUE(ToStatus(cudaSuccess, "call").ok()); }

TEST(CudaErrorTest, EachClassHasItsCode) {
  EXPECT_EQ(CodeOf(cudaErrorMemoryAllocation), absl::StatusCode::kResourceExhausted);
  for (const cudaError_t error : {cudaErrorNoDevice, cudaErrorInsufficientDriver,
                                  cudaErrorInvalidDevice, cudaErrorSystemDriverMismatch}) {
    EXPECT_EQ(CodeOf(error), absl::StatusCode::kFailedPrecondition) << cudaGetErrorName(error);
  }
  for (const cudaError_t error : {cudaErrorNoKernelImageForDevice, cudaErrorUnsupportedPtxVersion,
                                  cudaErrorInvalidPtx, cudaErrorInvalidDeviceFunction}) {
    EXPECT_EQ(CodeOf(error), absl::StatusCode::kUnimplemented) << cudaGetErrorName(error);
  }
  for (const cudaError_t error : {cudaErrorInvalidValue, cudaErrorIllegalAddress,
                                  cudaErrorLaunchFailure, cudaErrorInvalidConfiguration}) {
    EXPECT_EQ(CodeOf(error), absl::StatusCode::kInternal) << cudaGetErrorName(error);
  }
}

TEST(CudaErrorTest, MessageNamesTheCallAndTheError) {
  const absl::Status status = ToStatus(cudaErrorInvalidValue, "cudaMemcpyAsync(a, b)");
  EXPECT_THAT(std::string(status.message()), HasSubstr("cudaMemcpyAsync(a, b)"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("cudaErrorInvalidValue"));
}

TEST(CudaErrorTest, StickyErrorsAreThoseThatLoseTheContext) {
  for (const cudaError_t error :
       {cudaErrorIllegalAddress, cudaErrorLaunchFailure, cudaErrorECCUncorrectable, cudaErrorAssert,
        cudaErrorMisalignedAddress, cudaErrorHardwareStackError, cudaErrorIllegalInstruction,
        cudaErrorInvalidPc, cudaErrorContextIsDestroyed}) {
    EXPECT_TRUE(IsSticky(error)) << cudaGetErrorName(error);
  }
  for (const cudaError_t error : {cudaSuccess, cudaErrorMemoryAllocation, cudaErrorInvalidValue,
                                  cudaErrorInvalidConfiguration, cudaErrorNoDevice,
                                  cudaErrorNotReady, cudaErrorLaunchOutOfResources}) {
    EXPECT_FALSE(IsSticky(error)) << cudaGetErrorName(error);
  }
}

absl::Status MacroOver(cudaError_t error) {
  AWQD_CUDA_RETURN_IF_ERROR(error);
  return absl::AlreadyExistsError("reached the end");
}

TEST(CudaErrorTest, MacroReturnsOnlyErrors) {
  EXPECT_EQ(MacroOver(cudaSuccess).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(MacroOver(cudaErrorInvalidValue).code(), absl::StatusCode::kInternal);
}

TEST(CudaErrorTest, OnlyStickyErrorsPoisonTheDevice) {
  ASSERT_FALSE(Poisoned(CurrentDevice()));
  EXPECT_FALSE(Report(cudaErrorMemoryAllocation, "call").ok());
  EXPECT_FALSE(Poisoned(CurrentDevice()));
  EXPECT_FALSE(Report(cudaErrorIllegalAddress, "call").ok());
  EXPECT_TRUE(Poisoned(CurrentDevice()));
  EXPECT_FALSE(Poisoned(CurrentDevice() + 1));
}

TEST(WhyNotUsableTest, EachReasonIsNamed) {
  EXPECT_EQ(WhyNotUsable(0, 13000, 13000, 1), "");
  EXPECT_EQ(WhyNotUsable(0, 13000, 13020, 1), "");
  EXPECT_THAT(WhyNotUsable(0, 0, 13000, -1), HasSubstr("no NVIDIA driver"));
  EXPECT_THAT(WhyNotUsable(0, 12040, 13000, -1), HasSubstr("CUDA 12.4"));
  EXPECT_THAT(WhyNotUsable(0, 13000, 13000, 0), HasSubstr("no GPU"));
  EXPECT_THAT(WhyNotUsable(1, 13000, 13000, 1), HasSubstr("has 1 (cuda:0)"));
  EXPECT_THAT(WhyNotUsable(5, 13000, 13000, 4), HasSubstr("cuda:0..cuda:3"));
}

TEST(WhyNoCodeTest, NamesWhatToBuild) {
  for (const auto& [arch, code] :
       {std::pair(75, 75), {80, 80}, {89, 75}, {90, 90}, {90, 80}, {100, 90}, {120, 120}}) {
    EXPECT_EQ(WhyNoCode(arch, code), "") << arch;
  }
  EXPECT_THAT(WhyNoCode(70, 70), HasSubstr("7.5 or newer"));
  EXPECT_THAT(WhyNoCode(75, 0), HasSubstr("ARCHITECTURES=75-real"));
  EXPECT_THAT(WhyNoCode(86, 0),
              HasSubstr("no kernels, build with -DAWQD_CUDA_ARCHITECTURES=80-real"));
  EXPECT_THAT(WhyNoCode(90, 0),
              HasSubstr("no kernels, build with -DAWQD_CUDA_ARCHITECTURES=90a-real"));
  EXPECT_THAT(WhyNoCode(100, 0), HasSubstr("ARCHITECTURES=90-virtual"));
}

TEST(ArchOfTest, IsTheCodesWhereThatLacksWhatTheGpuHas) {
  const struct {
    int gpu, code, expected;
  } cases[] = {{75, 75, 75},   {80, 80, 80},  {86, 80, 86}, {89, 80, 89},
               {89, 75, 75},   {90, 90, 90},  {90, 80, 80}, {90, 75, 75},
               {100, 90, 100}, {120, 80, 80}, {120, 75, 75}};
  for (const auto& [gpu, code, expected] : cases) {
    EXPECT_EQ(ArchOf(gpu, code, "").value(), expected) << gpu << " with code for " << code;
  }
}

TEST(ArchOfTest, AWishLowersItAsFarAsTheCodeGoes) {
  EXPECT_EQ(ArchOf(90, 90, "80").value(), 80);
  EXPECT_EQ(ArchOf(90, 90, "120").value(), 90);
  EXPECT_EQ(ArchOf(90, 75, "75").value(), 75);
  for (const char* wish : {"75", "hopper", "70", "9.0", "-90"}) {
    const auto arch = ArchOf(90, 90, wish);
    EXPECT_EQ(arch.status().code(), absl::StatusCode::kInvalidArgument) << wish;
    EXPECT_THAT(std::string(arch.status().message()), HasSubstr("AWQD_CUDA_ARCH: got ")) << wish;
  }
  EXPECT_THAT(std::string(ArchOf(90, 90, "75").status().message()),
              HasSubstr("AWQD_CUDA_ARCHITECTURES=75-virtual"));
}

TEST(CudaDeviceTest, AnUnusableIndexIsOneClearLine) {
  // There is no cuda:63, with or without a GPU.
  const auto device = CudaDevice::Open(63, 0);
  ASSERT_EQ(device.status().code(), absl::StatusCode::kFailedPrecondition);
  const std::string message(device.status().message());
  EXPECT_EQ(message.rfind("cuda:63: ", 0), 0u) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos);
}

}  // namespace
}  // namespace awqd::cuda
