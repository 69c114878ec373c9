// Opens a GPU, and its streams and copies.
#include "kernels/cuda/core/device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/cuda/core/cublaslt.h"
#include "kernels/cuda/core/error.h"

namespace awqd::cuda {
namespace {

constexpr int kOldestArch = 75;
// From here on copies to shared memory are asynchronous, and there is arithmetic in BF16.
constexpr int kAsyncArch = 80;
// From here on kernels are launched in clusters and start before the one before has ended.
constexpr int kClusterArch = 90;

std::string Id(int index) { return absl::StrCat("cuda:", index); }

std::string Version(int version) { return absl::StrCat(version / 1000, ".", version % 1000 / 10); }

absl::Status Unusable(int index, absl::string_view why) {
  return absl::FailedPreconditionError(absl::StrCat(Id(index), ": ", why));
}

absl::Status CheckDriver(int index) {
  int driver = 0, gpus = -1;
  const cudaError_t asked = cudaDriverGetVersion(&driver);
  if (asked != cudaSuccess) driver = 0;
  cudaError_t counted = cudaSuccess;
  if (driver != 0) counted = cudaGetDeviceCount(&gpus);
  if (counted == cudaErrorNoDevice) gpus = 0;
  (void)cudaGetLastError();  // the answers above are all that is wanted of these calls
  const std::string why = WhyNotUsable(index, driver, CUDART_VERSION, gpus);
  if (!why.empty()) return Unusable(index, why);
  if (counted != cudaSuccess) {
    return Unusable(index, ToStatus(counted, "cudaGetDeviceCount").message());
  }
  return absl::OkStatus();
}

// 0 where the driver does not tell.
int64_t Attribute(int index, cudaDeviceAttr attribute) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, index) == cudaSuccess) return value;
  (void)cudaGetLastError();
  return 0;
}

// Memory transfers twice a clock.
int64_t MemoryBytesPerSecond(int index) {
  const int64_t khz = Attribute(index, cudaDevAttrMemoryClockRate);
  const int64_t bits = Attribute(index, cudaDevAttrGlobalMemoryBusWidth);
  return 2 * khz * 1000 * (bits / 8);
}

absl::StatusOr<DeviceInfo> Describe(int index) {
  cudaDeviceProp props = {};
  AWQD_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&props, index));
  DeviceInfo info;
  info.kind = DeviceKind::kCuda;
  info.index = index;
  info.id = Id(index);
  info.name = props.name;
  info.memory_bytes = static_cast<int64_t>(props.totalGlobalMem);
  info.arch = props.major * 10 + props.minor;
  info.sm_count = props.multiProcessorCount;
  info.l2_bytes = props.l2CacheSize;
  info.sm_clock_khz = Attribute(index, cudaDevAttrClockRate);
  info.memory_bytes_per_s = MemoryBytesPerSecond(index);
  info.shared_bytes_per_block = static_cast<int64_t>(props.sharedMemPerBlockOptin);
  // Only for metrics: a GPU without one computes as well.
  char bus_id[32] = {};
  if (cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), index) == cudaSuccess) {
    info.pci_bus_id = bus_id;
  } else {
    (void)cudaGetLastError();
  }
  info.dense_unavailable = CublasLt::Get().unavailable;
  return info;
}

// The most shared memory that a block may have on a data centre's GPU of compute capability
// `arch` / 10.
int64_t SharedBytes(int arch) {
  if (arch < kAsyncArch) return 65536;
  if (arch == 86 || arch == 89) return 101376;
  return arch < kClusterArch ? 166912 : 232448;
}

// Sets what kernels are chosen by to what the code of this build can do, or a wish allows.
absl::Status SetArchitecture(DeviceInfo* info) {
  AWQD_RETURN_IF_ERROR(UseDevice(info->index));
  absl::StatusOr<int> code = ProbeKernelImage();
  if (absl::IsUnimplemented(code.status())) code = 0;
  AWQD_RETURN_IF_ERROR(code.status());
  if (const std::string why = WhyNoCode(info->arch, *code); !why.empty()) {
    return Unusable(info->index, absl::StrCat(info->name, " (sm_", info->arch, "): ", why));
  }
  const char* const wish = std::getenv("AWQD_CUDA_ARCH");
  AWQD_ASSIGN_OR_RETURN(const int arch, ArchOf(info->arch, *code, wish == nullptr ? "" : wish));
  if (arch == info->arch) return absl::OkStatus();
  info->arch = arch;
  info->shared_bytes_per_block = std::min(info->shared_bytes_per_block, SharedBytes(arch));
  return absl::OkStatus();
}

absl::Status Copy(int index, void* to, const void* from, int64_t bytes, cudaMemcpyKind kind,
                  StreamView stream) {
  if (stream.handle == nullptr) {
    return absl::InvalidArgumentError(
        "copy: got the null stream, expected a stream of Device::CreateStream");
  }
  if (bytes == 0) return absl::OkStatus();
  AWQD_RETURN_IF_ERROR(UseDevice(index));
  AWQD_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind,
                                            static_cast<cudaStream_t>(stream.handle)));
  return absl::OkStatus();
}

class CudaStream final : public Stream {
 public:
  static absl::StatusOr<std::unique_ptr<CudaStream>> Create(int device) {
    AWQD_RETURN_IF_ERROR(UseDevice(device));
    cudaStream_t stream = nullptr;
    AWQD_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return std::unique_ptr<CudaStream>(new CudaStream(device, stream));
  }
  ~CudaStream() override {
    // A destructor has nobody to tell; Report has noted a sticky error.
    (void)Synchronize();
    if (counters_ != nullptr) (void)Report(cudaFree(counters_), "cudaFree");
    (void)Report(cudaStreamDestroy(stream_), "cudaStreamDestroy");
  }
  // A stream's counters do not count towards the budget, as what the driver allocates for a stream
  // does not.
  absl::Status AddCounters() {
    constexpr size_t kBytes = kStreamCounters * sizeof(uint32_t);
    AWQD_CUDA_RETURN_IF_ERROR(cudaMalloc(&counters_, kBytes));
    AWQD_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(counters_, 0, kBytes, stream_));
    return absl::OkStatus();
  }
  StreamView view() const override { return {stream_, static_cast<uint32_t*>(counters_)}; }
  absl::Status Synchronize() override {
    AWQD_RETURN_IF_ERROR(UseDevice(device_));
    AWQD_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_));
    return absl::OkStatus();
  }

 private:
  CudaStream(int device, cudaStream_t stream) : device_(device), stream_(stream) {}

  const int device_;
  const cudaStream_t stream_;
  void* counters_ = nullptr;
};

}  // namespace

std::string WhyNotUsable(int index, int driver_version, int runtime_version, int gpus) {
  if (driver_version == 0) return "no NVIDIA driver on this machine";
  // Within one major release a driver runs programs built with any of its minor releases.
  if (driver_version / 1000 < runtime_version / 1000) {
    return absl::StrCat("the NVIDIA driver supports CUDA ", Version(driver_version),
                        ", this build needs ", runtime_version / 1000, ".0 or newer");
  }
  if (gpus == 0) return "the NVIDIA driver finds no GPU";
  if (gpus > 0 && index >= gpus) {
    return absl::StrCat("no such GPU, this machine has ", gpus, " (cuda:0",
                        gpus > 1 ? absl::StrCat("..cuda:", gpus - 1) : "", ")");
  }
  return "";
}

std::string WhyNoCode(int arch, int code) {
  if (arch < kOldestArch) return "compute capability 7.5 or newer is needed";
  if (code != 0) return "";
  const char* build = arch < kAsyncArch      ? "75-real"
                      : arch < kClusterArch  ? "80-real"
                      : arch == kClusterArch ? "90a-real"
                                             : "90-virtual";
  return absl::StrCat("this build has no kernels, build with -DAWQD_CUDA_ARCHITECTURES=", build);
}

absl::StatusOr<int> ArchOf(int gpu, int code, absl::string_view wish) {
  int arch = gpu;
  for (const int step : {kClusterArch, kAsyncArch}) {
    if (gpu >= step && code < step) arch = code;
  }
  if (wish.empty()) return arch;
  int wanted = 0;
  if (!absl::SimpleAtoi(wish, &wanted) || wanted < kOldestArch) {
    return absl::InvalidArgumentError(absl::StrCat(
        "AWQD_CUDA_ARCH: got \"", wish, "\", expected a compute capability x 10 of 75 or more"));
  }
  if (wanted < kAsyncArch && code >= kAsyncArch) {
    return absl::InvalidArgumentError(
        absl::StrCat("AWQD_CUDA_ARCH: got ", wanted, ", but the code for this GPU is that of sm_",
                     code, "; build with -DAWQD_CUDA_ARCHITECTURES=75-virtual"));
  }
  return std::min(arch, wanted);
}

absl::StatusOr<std::unique_ptr<Device>> CudaDevice::Open(int index, int64_t budget_bytes,
                                                         bool batch_invariant,
                                                         const std::string& id_suffix) {
  if (index < 0) return Unusable(index, "expected an index of 0 or more");
  AWQD_RETURN_IF_ERROR(CheckDriver(index));
  AWQD_ASSIGN_OR_RETURN(DeviceInfo info, Describe(index));
  AWQD_RETURN_IF_ERROR(SetArchitecture(&info));
  info.batch_invariant = batch_invariant;
  info.id += id_suffix;
  AWQD_ASSIGN_OR_RETURN(auto memory, DeviceMemory::Create(index, budget_bytes));
  return std::unique_ptr<Device>(new CudaDevice(std::move(info), std::move(memory)));
}

absl::StatusOr<Buffer> CudaDevice::Allocate(MemoryKind kind, int64_t bytes) {
  return kind == MemoryKind::kStaging ? AllocateStaging(info_.index, bytes)
                                      : memory_->Allocate(kind, bytes);
}

absl::StatusOr<std::unique_ptr<Stream>> CudaDevice::CreateStream() {
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<CudaStream> out, CudaStream::Create(info_.index));
  AWQD_RETURN_IF_ERROR(out->AddCounters());
  return out;
}

absl::StatusOr<std::unique_ptr<Stream>> CudaDevice::CreateCopyStream() {
  return CudaStream::Create(info_.index);
}

absl::Status CudaDevice::CopyToDevice(void* device, const void* host, int64_t bytes,
                                      StreamView stream) {
  return Copy(info_.index, device, host, bytes, cudaMemcpyHostToDevice, stream);
}

absl::Status CudaDevice::CopyToHost(void* host, const void* device, int64_t bytes,
                                    StreamView stream) {
  return Copy(info_.index, host, device, bytes, cudaMemcpyDeviceToHost, stream);
}

bool CudaDevice::healthy() const { return !Poisoned(info_.index); }

}  // namespace awqd::cuda
