// Memory of weights that other processes map: the driver's virtual memory management (VMM).
//
// A pool's memory can be exported as well, but only pool by pool, and each model would need one.
// Unmapping does not wait for the device, as cudaFree does. The driver gives a descriptor no rights:
// a borrower maps it for reading because libawqd asks for no more.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/core/device.h"
#include "kernels/cuda/core/error.h"

namespace awqd::cuda {
namespace {

// The driver's functions, which the runtime does not have.
struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuMemImportFromShareableHandle) import_handle = nullptr;
  decltype(&cuMemGetAllocationPropertiesFromHandle) properties = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_address = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuGetErrorName) error_name = nullptr;
  bool complete = true;

  static const Driver& Get() {
    static const Driver driver;
    return driver;
  }

 private:
  Driver() {
    Find("cuMemGetAllocationGranularity", &granularity);
    Find("cuMemCreate", &create);
    Find("cuMemRelease", &release);
    Find("cuMemExportToShareableHandle", &export_handle);
    Find("cuMemImportFromShareableHandle", &import_handle);
    Find("cuMemGetAllocationPropertiesFromHandle", &properties);
    Find("cuMemAddressReserve", &reserve);
    Find("cuMemAddressFree", &free_address);
    Find("cuMemMap", &map);
    Find("cuMemUnmap", &unmap);
    Find("cuMemSetAccess", &set_access);
    Find("cuGetErrorName", &error_name);
  }
  template <typename Function>
  void Find(const char* name, Function* out) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t asked =
        cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
    if (asked == cudaSuccess && found == cudaDriverEntryPointSuccess && function != nullptr) {
      *out = reinterpret_cast<Function>(function);
      return;
    }
    (void)cudaGetLastError();
    complete = false;
  }
};

std::string NameOf(CUresult error) {
  const char* name = nullptr;
  if (Driver::Get().error_name(error, &name) == CUDA_SUCCESS && name != nullptr) return name;
  return absl::StrCat("error ", static_cast<int>(error));
}

// RESOURCE_EXHAUSTED where memory ran out, else FAILED_PRECONDITION.
absl::Status Failed(int device, CUresult error, absl::string_view call) {
  const std::string text =
      absl::StrCat("cuda:", device, " memory: cannot be shared: ", call, ": ", NameOf(error));
  return error == CUDA_ERROR_OUT_OF_MEMORY ? absl::ResourceExhaustedError(text)
                                           : absl::FailedPreconditionError(text);
}

CUmemAllocationProp Properties(int device) {
  CUmemAllocationProp out = {};
  out.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  out.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  out.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return out;
}

absl::StatusOr<int64_t> Granularity(int device) {
  AWQD_RETURN_IF_ERROR(UseDevice(device));
  if (!Driver::Get().complete) {
    return absl::FailedPreconditionError(
        absl::StrCat("cuda:", device, " memory: cannot be shared: the driver is too old"));
  }
  size_t bytes = 0;
  const CUmemAllocationProp properties = Properties(device);
  const CUresult error =
      Driver::Get().granularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (error != CUDA_SUCCESS) return Failed(device, error, "cuMemGetAllocationGranularity");
  return static_cast<int64_t>(bytes);
}

// Maps an allocation at an address of its own. The buffer's end unmaps it.
absl::StatusOr<Buffer> Map(int device, CUmemGenericAllocationHandle handle, int64_t bytes,
                           CUmemAccess_flags access) {
  const Driver& driver = Driver::Get();
  const auto size = static_cast<size_t>(bytes);
  CUdeviceptr at = 0;
  CUresult error = driver.reserve(&at, size, 0, 0, 0);
  if (error != CUDA_SUCCESS) return Failed(device, error, "cuMemAddressReserve");
  error = driver.map(at, size, 0, handle, 0);
  if (error != CUDA_SUCCESS) {
    driver.free_address(at, size);
    return Failed(device, error, "cuMemMap");
  }
  const auto unmap = [device](void* memory, int64_t mapped) {
    // A device that is gone has no mappings.
    if (!UseDevice(device).ok()) return;
    const auto address = reinterpret_cast<CUdeviceptr>(memory);
    Driver::Get().unmap(address, static_cast<size_t>(mapped));
    Driver::Get().free_address(address, static_cast<size_t>(mapped));
  };
  Buffer out(reinterpret_cast<void*>(at), bytes, unmap);
  const CUmemAccessDesc wanted = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
                                  .flags = access};
  error = driver.set_access(at, size, &wanted, 1);
  if (error != CUDA_SUCCESS) return Failed(device, error, "cuMemSetAccess");
  return out;
}

}  // namespace

absl::StatusOr<ExportedMemory> DeviceMemory::Export(int64_t bytes) {
  AWQD_ASSIGN_OR_RETURN(const int64_t unit, Granularity(device_));
  bytes = RoundUp(std::max<int64_t>(bytes, 1), unit);
  if (!Reserve(bytes)) return NoRoom(bytes);
  // Frees the reservation with the memory, or on the way out.
  const std::shared_ptr<void> reserved(
      nullptr, [self = shared_from_this(), bytes](void*) { self->used_ -= bytes; });
  const Driver& driver = Driver::Get();
  const CUmemAllocationProp properties = Properties(device_);
  CUmemGenericAllocationHandle handle = 0;
  CUresult error = driver.create(&handle, static_cast<size_t>(bytes), &properties, 0);
  if (error == CUDA_ERROR_OUT_OF_MEMORY) return NoRoom(bytes);
  if (error != CUDA_SUCCESS) return Failed(device_, error, "cuMemCreate");
  int fd = -1;
  error = driver.export_handle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  UniqueFd descriptor(error == CUDA_SUCCESS ? fd : -1);
  absl::StatusOr<Buffer> mapped =
      error == CUDA_SUCCESS ? Map(device_, handle, bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
                            : Failed(device_, error, "cuMemExportToShareableHandle");
  driver.release(handle);  // mapping and descriptor keep the memory
  AWQD_RETURN_IF_ERROR(mapped.status());
  void* const data = mapped->data();
  auto owner = std::make_shared<Buffer>(*std::move(mapped));
  return ExportedMemory{Buffer(data, bytes, [owner, reserved](void*, int64_t) {}),
                        std::move(descriptor)};
}

absl::StatusOr<ExportedMemory> CudaDevice::Export(int64_t bytes) { return memory_->Export(bytes); }

absl::StatusOr<Buffer> CudaDevice::MapDescriptor(const UniqueFd& descriptor, int64_t bytes,
                                                 int access) {
  const Driver& driver = Driver::Get();
  CUmemGenericAllocationHandle handle = 0;
  CUresult error = driver.import_handle(
      &handle, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor.get())),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (error != CUDA_SUCCESS) {
    return absl::InvalidArgumentError(absl::StrCat("got a descriptor that ", info_.id,
                                                   " cannot open (", NameOf(error),
                                                   "), expected that of memory of this GPU"));
  }
  CUmemAllocationProp properties = {};
  error = driver.properties(&properties, handle);
  const CUmemLocation& place = properties.location;
  absl::StatusOr<Buffer> out = absl::InvalidArgumentError(
      absl::StrCat("got memory of another place (", static_cast<int>(place.type), ", ", place.id,
                   "), expected that of ", info_.id));
  if (error == CUDA_SUCCESS && place.type == CU_MEM_LOCATION_TYPE_DEVICE &&
      place.id == info_.index) {
    out = Map(info_.index, handle, bytes, static_cast<CUmemAccess_flags>(access));
  }
  driver.release(handle);
  return out;
}

absl::StatusOr<Buffer> CudaDevice::Import(const UniqueFd& descriptor, int64_t bytes) {
  AWQD_ASSIGN_OR_RETURN(const int64_t unit, Granularity(info_.index));
  if (bytes <= 0 || bytes % unit != 0) {
    return BadValue("memory", absl::StrCat(bytes, " bytes"), absl::StrCat("a multiple of ", unit));
  }
  absl::StatusOr<Buffer> out = MapDescriptor(descriptor, bytes, CU_MEM_ACCESS_FLAGS_PROT_READ);
  if (!out.ok()) return Prefixed("memory", out.status());
  return out;
}

absl::StatusOr<Buffer> CudaDevice::ImportMemory(const UniqueFd& descriptor, int64_t bytes) {
  AWQD_ASSIGN_OR_RETURN(const int64_t unit, Granularity(info_.index));
  // No GPU has more; rounding up cannot overflow then.
  if (bytes <= 0 || bytes > info_.memory_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("got memory of ", bytes, " bytes, expected 1 to ", info_.memory_bytes));
  }
  absl::StatusOr<Buffer> mapped =
      MapDescriptor(descriptor, RoundUp(bytes, unit), CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  if (absl::IsFailedPrecondition(mapped.status())) {
    return absl::InvalidArgumentError(absl::StrCat("got memory that has not ", bytes, " bytes (",
                                                   mapped.status().message(),
                                                   "), expected so many"));
  }
  AWQD_ASSIGN_OR_RETURN(Buffer out, std::move(mapped));
  // Those that cannot reach it copy by way of the host.
  int gpus = 0;
  AWQD_CUDA_RETURN_IF_ERROR(cudaGetDeviceCount(&gpus));
  for (int other = 0; other < gpus; ++other) {
    int reaches = 0;
    if (other == info_.index ||
        cudaDeviceCanAccessPeer(&reaches, other, info_.index) != cudaSuccess || reaches == 0) {
      continue;
    }
    const CUmemAccessDesc wanted = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = other},
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    Driver::Get().set_access(reinterpret_cast<CUdeviceptr>(out.data()),
                             static_cast<size_t>(out.size()), &wanted, 1);
  }
  (void)cudaGetLastError();
  return out;
}

}  // namespace awqd::cuda
