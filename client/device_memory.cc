// The driver's functions by name, and memory of both kinds.
#include "client/device_memory.h"

#include <dlfcn.h>

#include <type_traits>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"

namespace awqd::client {
namespace {

// Structs and numbers of the driver's ABI since CUDA 10.2.
struct Location {
  int type = 1, id = 0;  // memory of a device
};
struct AllocationProperties {
  int type = 1;    // pinned
  int handle = 1;  // a file descriptor
  Location location;
  void* unused = nullptr;
  unsigned char flags[8] = {};
};
struct Access {
  Location location;
  int flags = 3;  // reading and writing
};
static_assert(sizeof(AllocationProperties) == 32 && sizeof(Access) == 12);
constexpr int kFileDescriptor = 1, kOutOfMemory = 2;
constexpr size_t kHandleBytes = 64;

struct Driver {
  int (*init)(unsigned);
  int (*error_name)(int, const char**);
  int (*device)(int*, int);
  int (*bus_id)(char*, int, int);
  int (*retain_context)(void**, int);
  int (*release_context)(int);
  int (*push_context)(void*);
  int (*pop_context)(void**);
  int (*allocate)(uint64_t*, size_t);
  int (*free)(uint64_t);
  int (*ipc_handle)(char*, uint64_t);
  int (*write)(uint64_t, const void*, size_t);
  int (*read)(void*, uint64_t, size_t);
  int (*synchronize)();
  int (*granularity)(size_t*, const void* /* AllocationProperties */, int);
  int (*create)(uint64_t*, size_t, const void* /* AllocationProperties */, unsigned long long);
  int (*release)(uint64_t);
  int (*export_handle)(void*, uint64_t, int, unsigned long long);
  int (*reserve)(uint64_t*, size_t, size_t, uint64_t, unsigned long long);
  int (*free_address)(uint64_t, size_t);
  int (*map)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
  int (*unmap)(uint64_t, size_t);
  int (*set_access)(uint64_t, size_t, const void* /* Access */, size_t);

  // Opened once; never closed, because threads of the driver may run in it.
  static const absl::StatusOr<Driver>& Get() {
    static const absl::StatusOr<Driver> driver = Open();
    return driver;
  }
  static absl::StatusOr<Driver> Open();
};

std::string NameOf(const Driver& driver, int error) {
  const char* name = nullptr;
  if (driver.error_name(error, &name) == 0 && name != nullptr) return name;
  return absl::StrCat("error ", error);
}

absl::Status Check(const Driver& driver, int error, absl::string_view call) {
  if (error == 0) return absl::OkStatus();
  const std::string text = absl::StrCat("memory of a GPU: ", call, ": ", NameOf(driver, error));
  return error == kOutOfMemory ? absl::ResourceExhaustedError(text)
                               : absl::FailedPreconditionError(text);
}

absl::StatusOr<Driver> Driver::Open() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError("memory of a GPU: no NVIDIA driver on this machine");
  }
  Driver out = {};
  const char* missing = nullptr;
  const auto find = [&](const char* name, auto* function) {
    *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, name));
    if (*function == nullptr) missing = name;
  };
  find("cuInit", &out.init);
  find("cuGetErrorName", &out.error_name);
  find("cuDeviceGet", &out.device);
  find("cuDeviceGetPCIBusId", &out.bus_id);
  find("cuDevicePrimaryCtxRetain", &out.retain_context);
  find("cuDevicePrimaryCtxRelease_v2", &out.release_context);
  find("cuCtxPushCurrent_v2", &out.push_context);
  find("cuCtxPopCurrent_v2", &out.pop_context);
  find("cuMemAlloc_v2", &out.allocate);
  find("cuMemFree_v2", &out.free);
  find("cuIpcGetMemHandle", &out.ipc_handle);
  find("cuMemcpyHtoD_v2", &out.write);
  find("cuMemcpyDtoH_v2", &out.read);
  find("cuCtxSynchronize", &out.synchronize);
  find("cuMemGetAllocationGranularity", &out.granularity);
  find("cuMemCreate", &out.create);
  find("cuMemRelease", &out.release);
  find("cuMemExportToShareableHandle", &out.export_handle);
  find("cuMemAddressReserve", &out.reserve);
  find("cuMemAddressFree", &out.free_address);
  find("cuMemMap", &out.map);
  find("cuMemUnmap", &out.unmap);
  find("cuMemSetAccess", &out.set_access);
  if (missing != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("memory of a GPU: the NVIDIA driver is too old: it has no ", missing));
  }
  AWQD_RETURN_IF_ERROR(Check(out, out.init(0), "cuInit"));
  return out;
}

// Makes a context current, for as long as this lives.
class Current {
 public:
  explicit Current(void* context) : error_(Driver::Get()->push_context(context)) {}
  ~Current() {
    void* popped = nullptr;
    if (error_ == 0) Driver::Get()->pop_context(&popped);
  }
  absl::Status status() const { return Check(*Driver::Get(), error_, "cuCtxPushCurrent"); }

 private:
  const int error_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMemory>> DeviceMemory::Allocate(int gpu, int64_t bytes,
                                                                     Kind kind) {
  if (bytes <= 0) return Invalid("bytes: got ", bytes, ", expected more than 0");
  AWQD_RETURN_IF_ERROR(Driver::Get().status());
  const Driver& driver = *Driver::Get();
  int device = 0;
  AWQD_RETURN_IF_ERROR(Check(driver, driver.device(&device, gpu), absl::StrCat("GPU ", gpu)));
  char bus_id[32] = {};
  AWQD_RETURN_IF_ERROR(
      Check(driver, driver.bus_id(bus_id, sizeof(bus_id), device), "cuDeviceGetPCIBusId"));
  std::unique_ptr<DeviceMemory> out(new DeviceMemory(bytes));
  out->bus_id_ = bus_id;
  AWQD_RETURN_IF_ERROR(
      Check(driver, driver.retain_context(&out->context_, device), "cuDevicePrimaryCtxRetain"));
  out->device_ = device;
  const Current current(out->context_);
  AWQD_RETURN_IF_ERROR(current.status());
  AWQD_RETURN_IF_ERROR(kind == Kind::kIpc ? out->AllocateShared() : out->MapShared(device));
  return out;
}

absl::Status DeviceMemory::AllocateShared() {
  const Driver& driver = *Driver::Get();
  AWQD_RETURN_IF_ERROR(
      Check(driver, driver.allocate(&address_, static_cast<size_t>(bytes_)), "cuMemAlloc"));
  handle_.resize(kHandleBytes);
  return Check(driver, driver.ipc_handle(handle_.data(), address_), "cuIpcGetMemHandle");
}

absl::Status DeviceMemory::MapShared(int device) {
  const Driver& driver = *Driver::Get();
  const AllocationProperties properties = {.location = {.id = device}};
  size_t unit = 0;
  AWQD_RETURN_IF_ERROR(Check(driver, driver.granularity(&unit, &properties, /*minimum*/ 0),
                             "cuMemGetAllocationGranularity"));
  const size_t size = (static_cast<size_t>(bytes_) + unit - 1) / unit * unit;
  uint64_t memory = 0;
  AWQD_RETURN_IF_ERROR(Check(driver, driver.create(&memory, size, &properties, 0), "cuMemCreate"));
  // The descriptor and the mapping keep the memory.
  const absl::Cleanup release = [&] { driver.release(memory); };
  int fd = -1;
  AWQD_RETURN_IF_ERROR(Check(driver, driver.export_handle(&fd, memory, kFileDescriptor, 0),
                             "cuMemExportToShareableHandle"));
  descriptor_.Reset(fd);
  uint64_t address = 0;
  AWQD_RETURN_IF_ERROR(
      Check(driver, driver.reserve(&address, size, 0, 0, 0), "cuMemAddressReserve"));
  const int error = driver.map(address, size, 0, memory, 0);
  if (error != 0) {
    driver.free_address(address, size);
    return Check(driver, error, "cuMemMap");
  }
  address_ = address;
  mapped_ = size;
  const Access access = {.location = {.id = device}};
  return Check(driver, driver.set_access(address, size, &access, 1), "cuMemSetAccess");
}

DeviceMemory::~DeviceMemory() {
  if (device_ < 0) return;
  const Driver& driver = *Driver::Get();
  {
    const Current current(context_);
    if (mapped_ > 0) {
      driver.unmap(address_, mapped_);
      driver.free_address(address_, mapped_);
    } else if (address_ != 0) {
      driver.free(address_);
    }
  }
  driver.release_context(device_);
}

absl::Status DeviceMemory::CheckRange(int64_t offset, int64_t bytes) const {
  if (offset >= 0 && bytes >= 0 && bytes <= bytes_ && offset <= bytes_ - bytes) {
    return absl::OkStatus();
  }
  return Invalid("offset: got ", offset, " for ", bytes, " bytes, expected a range within ",
                 bytes_);
}

absl::Status DeviceMemory::Write(int64_t offset, absl::string_view bytes) const {
  AWQD_RETURN_IF_ERROR(CheckRange(offset, static_cast<int64_t>(bytes.size())));
  const Driver& driver = *Driver::Get();
  const Current current(context_);
  AWQD_RETURN_IF_ERROR(current.status());
  const uint64_t to = address_ + static_cast<uint64_t>(offset);
  AWQD_RETURN_IF_ERROR(Check(driver, driver.write(to, bytes.data(), bytes.size()), "cuMemcpyHtoD"));
  return Check(driver, driver.synchronize(), "cuCtxSynchronize");
}

absl::StatusOr<std::string> DeviceMemory::Read(int64_t offset, int64_t bytes) const {
  AWQD_RETURN_IF_ERROR(CheckRange(offset, bytes));
  const Driver& driver = *Driver::Get();
  const Current current(context_);
  AWQD_RETURN_IF_ERROR(current.status());
  std::string out(static_cast<size_t>(bytes), '\0');
  AWQD_RETURN_IF_ERROR(
      Check(driver, driver.read(out.data(), address_ + static_cast<uint64_t>(offset), out.size()),
            "cuMemcpyDtoH"));
  return out;
}

v1::ShareMemoryRequest DeviceMemory::Request(absl::string_view region) const {
  v1::ShareMemoryRequest out;
  out.set_region(std::string(region));
  out.set_device(bus_id_);
  out.set_cuda_ipc_memory(handle_);
  out.set_size(bytes_);
  return out;
}

v1::SharedMemory DeviceMemory::Range(absl::string_view region, int64_t offset, int64_t size) {
  v1::SharedMemory out;
  out.set_region(std::string(region));
  out.set_offset(offset);
  out.set_size(size);
  return out;
}

}  // namespace awqd::client
