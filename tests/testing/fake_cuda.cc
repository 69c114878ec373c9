// A fake of the CUDA driver with one GPU, "cpu": its memory is this process's, which a WrappedDevice
// maps. For DeviceMemory, and for the Python client.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>

namespace {

constexpr int kInvalid = 1, kUnit = 4096;
constexpr int kOrdinal = 9, kMappingSize = 18, kMappingBase = 19;  // attributes of a pointer

struct Memory {
  void* data;
  size_t bytes;
};
std::map<uint64_t, Memory> allocated;
struct Mapping {
  size_t bytes;
  int handle;
};
std::map<uint64_t, Mapping> mapped;
char the_context, the_event;
int recorded, waited;  // how often the event was

// The mapping that holds the address, or the end.
std::map<uint64_t, Mapping>::iterator FindMapping(uint64_t address) {
  auto after = mapped.upper_bound(address);
  if (after == mapped.begin()) return mapped.end();
  --after;
  return address < after->first + after->second.bytes ? after : mapped.end();
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_INVALID_VALUE";
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = 0;
  return ordinal == 0 ? 0 : kInvalid;
}
int cuDeviceGetPCIBusId(char* id, int length, int) {
  std::strncpy(id, "cpu", static_cast<size_t>(length));
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &the_context;
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxPushCurrent_v2(void* context) { return context == &the_context ? 0 : kInvalid; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuCtxSynchronize() { return 0; }

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  void* const data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *address = reinterpret_cast<uint64_t>(data);
  allocated[*address] = {data, bytes};
  return 0;
}
int cuMemFree_v2(uint64_t address) {
  munmap(allocated[address].data, allocated[address].bytes);
  return allocated.erase(address) == 1 ? 0 : kInvalid;
}
int cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address) {
  *base = address;
  *bytes = 0;
  return 0;
}
// As WrappedDevice::Export.
int cuIpcGetMemHandle(char* handle, uint64_t address) {
  if (allocated.count(address) == 0) return kInvalid;
  const struct {
    uint64_t magic;
    Memory memory;
  } exported = {0x64657870, allocated[address]};
  std::memset(handle, 0, 64);
  std::memcpy(handle, &exported, sizeof(exported));
  return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return 0;
}

// A handle is a descriptor.
int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  *bytes = kUnit;
  return 0;
}
int cuMemCreate(uint64_t* handle, size_t bytes, const void*, unsigned long long) {
  const int fd = memfd_create("fake", MFD_CLOEXEC);
  *handle = static_cast<uint64_t>(fd);
  return fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : kInvalid;
}
int cuMemRelease(uint64_t handle) { return close(static_cast<int>(handle)); }
int cuMemExportToShareableHandle(void* fd, uint64_t handle, int, unsigned long long) {
  const int copy = dup(static_cast<int>(handle));
  std::memcpy(fd, &copy, sizeof(copy));
  return copy < 0;
}
int cuMemAddressReserve(uint64_t* address, size_t bytes, size_t, uint64_t, unsigned long long) {
  *address = reinterpret_cast<uint64_t>(
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  return 0;
}
int cuMemAddressFree(uint64_t address, size_t bytes) {
  return munmap(reinterpret_cast<void*>(address), bytes);
}
int cuMemMap(uint64_t address, size_t bytes, size_t, uint64_t handle, unsigned long long) {
  const int fd = dup(static_cast<int>(handle));
  mapped[address] = {bytes, fd};
  return mmap(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE,
              MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED;
}
int cuMemUnmap(uint64_t address, size_t) {
  close(mapped[address].handle);
  mapped.erase(address);
  return 0;
}
int cuMemRetainAllocationHandle(uint64_t* handle, void* address) {
  const auto found = FindMapping(reinterpret_cast<uint64_t>(address));
  if (found == mapped.end()) return kInvalid;
  *handle = static_cast<uint64_t>(dup(found->second.handle));
  return 0;
}
int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  const int ordinal = 0;
  if (attribute == kOrdinal) {
    std::memcpy(value, &ordinal, sizeof(ordinal));
    return 0;
  }
  const auto found = FindMapping(address);
  if (found == mapped.end()) return kInvalid;
  const uint64_t of_mapping = attribute == kMappingBase ? found->first : found->second.bytes;
  std::memcpy(value, &of_mapping, sizeof(of_mapping));
  return attribute == kMappingBase || attribute == kMappingSize ? 0 : kInvalid;
}
int cuMemSetAccess(uint64_t, size_t, const void*, size_t) { return 0; }

// Events. Their handle is WrappedDevice::EventHandle().
int cuEventCreate(void** event, unsigned) {
  *event = &the_event;
  return 0;
}
int cuEventDestroy_v2(void* event) { return event == &the_event ? 0 : kInvalid; }
int cuIpcGetEventHandle(char* handle, void* event) {
  std::memset(handle, 'e', 64);
  return event == &the_event ? 0 : kInvalid;
}
int cuEventRecord(void* event, void*) {
  ++recorded;
  return event == &the_event ? 0 : kInvalid;
}
int cuStreamWaitEvent(void*, void* event, unsigned) {
  ++waited;
  return event == &the_event ? 0 : kInvalid;
}
int fakeRecords() { return recorded; }
int fakeWaits() { return waited; }

}  // extern "C"
