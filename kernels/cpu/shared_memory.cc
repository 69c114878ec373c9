// Memory of weights that other processes map: memfds.
//
// A borrower gets the lender's descriptor, so the seals keep it from storing: they forbid every
// write but through mappings that are older. They forbid the lender to shorten the file, which would
// end a borrower's process by SIGBUS.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/host_memory.h"
#include "kernels/base/math.h"
#include "kernels/base/process_limits.h"
#include "kernels/base/status.h"
#include "kernels/cpu/device.h"

namespace awqd {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

absl::Status CannotShare(absl::string_view call) {
  return absl::FailedPreconditionError(
      absl::StrCat("cpu memory: cannot be shared: ", call, ": ", strerror(errno)));
}

// Maps the whole file on an address that suits huge pages. Null without room.
void* MapFile(int fd, int64_t bytes, int protection) {
  void* const place = MapHugePages(bytes);
  if (place == nullptr) return nullptr;
  if (mmap(place, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    UnmapHugePages(place, bytes);
    return nullptr;
  }
  AdviseHugePages(place, bytes);
  return place;
}

}  // namespace

absl::StatusOr<ExportedMemory> CpuDevice::Export(int64_t bytes) {
  bytes = RoundUp(std::max<int64_t>(bytes, 1), sysconf(_SC_PAGESIZE));
  const auto no_room = [&] {
    return absl::ResourceExhaustedError(
        absl::StrCat("cpu memory: asked for ", bytes, " bytes, ", FreeBytes(), " bytes are free"));
  };
  if (bytes > AvailableMemoryBytes()) return no_room();
  UniqueFd fd(memfd_create("awqd-weights", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.ok()) return CannotShare("memfd_create");
  if (ftruncate(fd.get(), bytes) != 0) return CannotShare("ftruncate");
  void* const data = MapFile(fd.get(), bytes, PROT_READ | PROT_WRITE);
  if (data == nullptr || !Reserve(bytes)) {
    if (data != nullptr) UnmapHugePages(data, bytes);
    return no_room();
  }
  Buffer memory(data, bytes, [this](void* mapped, int64_t size) {
    UnmapHugePages(mapped, size);
    used_ -= size;
  });
  if (fcntl(fd.get(), F_ADD_SEALS, kSizeSeals | F_SEAL_FUTURE_WRITE) != 0) {
    return CannotShare("sealing");
  }
  if (interleave_) InterleavePages(data, bytes);
  return ExportedMemory{std::move(memory), std::move(fd)};
}

absl::StatusOr<Buffer> CpuDevice::Import(const UniqueFd& descriptor, int64_t bytes) {
  struct stat file = {};
  if (fstat(descriptor.get(), &file) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("memory: got no descriptor that can be read: ", strerror(errno)));
  }
  const int seals = fcntl(descriptor.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    return BadValue("memory", "a file whose size can change", "a sealed memfd");
  }
  if (bytes <= 0 || file.st_size != bytes) {
    return BadValue("memory", absl::StrCat(file.st_size, " bytes"), bytes);
  }
  void* const data = MapFile(descriptor.get(), bytes, PROT_READ);
  if (data == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cpu memory: cannot map ", bytes, " bytes of another process"));
  }
  return Buffer(data, bytes, UnmapHugePages);
}

}  // namespace awqd
