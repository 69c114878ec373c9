// File: a regular file open for reading, that notices when it changes under the reader.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/unique_fd.h"

namespace awqd::model {

// What tells whether a file is the same one, with the same contents: device, inode, size, times of
// modification and of change.
class FileStamp {
 public:
  FileStamp() = default;
  explicit FileStamp(const struct stat& stat) : stat_(stat) {}

  // INVALID_ARGUMENT saying in what `now` differs; `name` is what it calls the file.
  absl::Status Check(const FileStamp& now, absl::string_view name) const;
  bool SameFileAs(const FileStamp& other) const {
    return stat_.st_dev == other.stat_.st_dev && stat_.st_ino == other.stat_.st_ino;
  }
  // All of that but the device, whose number changes when a file system is mounted again; two texts
  // differ where the files do.
  std::string Text() const;
  // The later of the two times.
  absl::Time changed() const;

 private:
  struct stat stat_ = {};
};

// Reads with pread, never mmap: a file truncated under a mapping would kill the process. Const
// members may be called from any thread.
class File {
 public:
  // Takes over `fd`. `name` is what errors call the file. INVALID_ARGUMENT for anything but a
  // regular file (directory, FIFO, device, socket).
  static absl::StatusOr<File> Adopt(UniqueFd fd, std::string name);

  const std::string& name() const { return name_; }
  // The same for messages, escaped: names on disk need not be UTF-8, which messages have to be.
  std::string shown_name() const;
  // Bytes when it was opened.
  int64_t size() const { return stat_.st_size; }

  // Fills `out` from `offset`. INVALID_ARGUMENT when the file ends earlier, INTERNAL on an I/O
  // error, UNAVAILABLE once `cancelled`, which is asked every 8 MiB.
  absl::Status ReadAt(int64_t offset, absl::Span<uint8_t> out,
                      const std::atomic<bool>* cancelled = nullptr) const;

  // INVALID_ARGUMENT when size, time of modification or time of change differ from when it was
  // opened.
  absl::Status CheckUnchanged() const;

  FileStamp stamp() const { return FileStamp(stat_); }  // when it was opened
  bool SameFileAs(const File& other) const { return stamp().SameFileAs(other.stamp()); }

 private:
  UniqueFd fd_;
  std::string name_;
  struct stat stat_ = {};
};

// INVALID_ARGUMENT, its message put together as by absl::StrCat.
template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// UNAVAILABLE once `cancelled` is true; null: never. Every loop over something that a file chose in
// size asks, which costs a load from memory.
absl::Status CheckCancelled(const std::atomic<bool>* cancelled);

// A system call's error as a status: absl::ErrnoToStatus, but INTERNAL for what it has no code for,
// a disk that fails (EIO) above all. `what` names the file and the call.
absl::Status FromSystem(int error, absl::string_view what);

// Text taken from a file or a client, made safe for one line of a message: escaped, at most
// `max_bytes` of it.
std::string Quoted(absl::string_view text, size_t max_bytes = 128);

// The longest prefix of at most `limit` bytes that ends between two UTF-8 characters.
absl::string_view ClipUtf8(absl::string_view text, size_t limit);

// The status with "<prefix>: " before its message.
absl::Status Prefixed(absl::string_view prefix, const absl::Status& status);

}  // namespace awqd::model
