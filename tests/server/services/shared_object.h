// SharedObject: a POSIX shared-memory object as a client makes one; and the number of open files.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <iterator>
#include <string>

#include "awqd/v1/tensor.pb.h"
#include "gtest/gtest.h"

namespace awqd::services {

class SharedObject {
 public:
  SharedObject(std::string name, const std::string& bytes) : name_(std::move(name)) {
    fd_ = shm_open(("/" + name_).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    EXPECT_GE(fd_, 0) << name_;
    Set(0, bytes);
  }
  ~SharedObject() {
    Unlink();
    close(fd_);
  }
  SharedObject(const SharedObject&) = delete;
  SharedObject& operator=(const SharedObject&) = delete;

  const std::string& name() const { return name_; }
  std::string path() const { return "/dev/shm/" + name_; }

  v1::SharedMemory Range(int64_t offset, int64_t size) const {
    v1::SharedMemory range;
    range.set_name(name_);
    range.set_offset(offset);
    range.set_size(size);
    return range;
  }
  void Set(int64_t offset, const std::string& bytes) {
    EXPECT_EQ(pwrite(fd_, bytes.data(), bytes.size(), offset), static_cast<ssize_t>(bytes.size()));
  }
  std::string Get(int64_t offset, int64_t size) const {
    std::string bytes(static_cast<size_t>(size), '\0');
    EXPECT_EQ(pread(fd_, bytes.data(), bytes.size(), offset), static_cast<ssize_t>(size));
    return bytes;
  }
  int64_t size() const {
    struct stat found = {};
    EXPECT_EQ(fstat(fd_, &found), 0);
    return found.st_size;
  }
  void Truncate(int64_t size) { EXPECT_EQ(ftruncate(fd_, size), 0); }
  void Unlink() {
    if (linked_) shm_unlink(("/" + name_).c_str());
    linked_ = false;
  }

 private:
  const std::string name_;
  int fd_ = -1;
  bool linked_ = true;
};

// The open descriptors of this process.
inline int OpenFiles() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

}  // namespace awqd::services
