// shm_open, and memory that is really there: posix_fallocate fails where writing to a full file
// system would end the process.
#include "client/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace awqd::client {
namespace {

absl::Status Failed(absl::string_view what, int error) {
  const std::string message =
      absl::StrCat("shared memory: ", what, ": ", std::strerror(error),
                   error == ENOSPC ? "; /dev/shm is full (in a container see --shm-size)" : "");
  return error == ENOSPC || error == ENOMEM || error == EMFILE
             ? absl::ResourceExhaustedError(message)
             : absl::UnavailableError(message);
}

}  // namespace

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(on_signal_, other.on_signal_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_));
  if (!name_.empty()) shm_unlink(absl::StrCat("/", name_).c_str());
}

absl::StatusOr<SharedMemory> SharedMemory::Create(absl::string_view prefix, int64_t bytes,
                                                  mode_t mode) {
  char random[16];
  if (getrandom(random, sizeof(random), 0) != sizeof(random)) return Failed("getrandom", errno);
  const std::string name = absl::StrCat(prefix, absl::BytesToHexString({random, sizeof(random)}));
  SharedMemory memory;
  // A handler may call unlink but not shm_unlink, which is the same to a file of this folder.
  memory.on_signal_ = RemoveOnSignal(absl::StrCat("/dev/shm/", name));
  const int fd = shm_open(absl::StrCat("/", name).c_str(), O_RDWR | O_CREAT | O_EXCL, mode);
  if (fd < 0) return Failed("shm_open", errno);
  memory.name_ = name;
  // Whatever the umask took away.
  int error = fchmod(fd, mode) == 0 ? 0 : errno;
  if (error == 0 && bytes > 0) error = posix_fallocate(fd, 0, bytes);
  if (error == 0 && bytes > 0) {
    void* const data =
        mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
      error = errno;
    } else {
      memory.data_ = static_cast<char*>(data);
      memory.size_ = bytes;
    }
  }
  close(fd);
  if (error != 0) return Failed(absl::StrCat(bytes, " bytes"), error);
  return memory;
}

v1::SharedMemory SharedMemory::Range(int64_t offset, int64_t size) const {
  v1::SharedMemory range;
  range.set_name(name_);
  range.set_offset(offset);
  range.set_size(size);
  return range;
}

}  // namespace awqd::client
