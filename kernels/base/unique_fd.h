// UniqueFd: a file descriptor that is closed when its owner is destroyed.
#pragma once

#include <unistd.h>

#include <utility>

namespace awqd {

// Move-only.
class UniqueFd {
 public:
  UniqueFd() = default;
  // Owns `fd`; a negative number stands for none.
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    Reset(other.Release());
    return *this;
  }
  ~UniqueFd() { Reset(); }

  int get() const { return fd_; }
  bool ok() const { return fd_ >= 0; }
  // The caller owns the descriptor from here on.
  int Release() { return std::exchange(fd_, -1); }
  // Closes the descriptor, if there is one, and owns `fd`.
  void Reset(int fd = -1) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

}  // namespace awqd
