// File: a regular file open for reading that notices when it changes; TensorFile: its tensors.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/base/unique_fd.h"

namespace awqd::model {

// The properties by which a file is known to be the same, with the same contents: device, inode,
// size, times of modification and of change.
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

  // INVALID_ARGUMENT for a pointer of Git LFS, which a clone has in the place of a file that was not
  // downloaded. Reads the file only where it is as small as a pointer.
  absl::Status CheckNoLfsPointer() const;

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

// Files by their paths beneath a root.
class FileSource {
 public:
  virtual ~FileSource() = default;

  // A regular file. `relative` is a path of plain components ("model/config.json"). NOT_FOUND,
  // PERMISSION_DENIED, INVALID_ARGUMENT for a special file or a way out of the root, UNAVAILABLE
  // while another process has a lease on it. Never waits for another process.
  virtual absl::StatusOr<File> OpenFile(absl::string_view relative) const = 0;

  // Names in the directory `relative` ("." for the root itself), sorted, without "." and "..". All
  // of them, or an error.
  virtual absl::StatusOr<std::vector<std::string>> ListDirectory(
      absl::string_view relative) const = 0;
};

struct TensorInfo {
  std::string dtype;           // safetensors spelling; of GGUF's blocks "Q4_0", ...
  std::vector<int64_t> shape;  // row-major, in elements
  int64_t begin = 0;           // bytes from the first byte of data
  int64_t end = 0;

  int64_t bytes() const { return end - begin; }
};

// INVALID_ARGUMENT that names a tensor, put together as by absl::StrCat.
template <typename... What>
absl::Status BadTensor(absl::string_view name, const What&... what) {
  return Invalid("tensor ", Quoted(name), ": ", what...);
}

using TensorMap = std::map<std::string, TensorInfo, std::less<>>;
// Texts that a file has beside its tensors: __metadata__ of safetensors.
using FileMetadata = std::map<std::string, std::string, std::less<>>;

// The entries in the order of their places in the file, by `begin` and then by `end`. They point
// into `tensors`.
std::vector<const TensorMap::value_type*> SortByOffset(const TensorMap& tensors);

// Const members may be called from any thread.
class TensorFile {
 public:
  // Every tensor lies within the file; data begins at byte `data_offset`.
  TensorFile(File file, int64_t data_offset, TensorMap tensors, FileMetadata metadata = {})
      : file_(std::move(file)),
        data_offset_(data_offset),
        tensors_(std::move(tensors)),
        metadata_(std::move(metadata)) {}

  const File& file() const { return file_; }
  const TensorMap& tensors() const { return tensors_; }
  // The text under that name in the file's own metadata; empty where there is none.
  absl::string_view FindMetadata(absl::string_view name) const {
    const auto it = metadata_.find(name);
    return it == metadata_.end() ? absl::string_view() : it->second;
  }
  int64_t header_bytes() const { return data_offset_; }  // all before the data

  // Fills `out`, which has tensor.bytes() bytes. Tensors need not be aligned in the file.
  absl::Status Read(const TensorInfo& tensor, absl::Span<uint8_t> out,
                    const std::atomic<bool>* cancelled = nullptr) const;

 private:
  File file_;
  int64_t data_offset_;
  TensorMap tensors_;
  FileMetadata metadata_;
};

// The quantised linears that cannot be read, by path (that of all experts where one tensor holds
// them), with the reason: UNIMPLEMENTED or INVALID_ARGUMENT, naming the path and what is wrong.
using UnservedLinears = std::map<std::string, absl::Status, std::less<>>;

// The place of a tensor, and in the account of a checkpoint's tensors what it belongs to.
struct TensorLocation {
  const TensorFile* file = nullptr;
  const TensorInfo* info = nullptr;
  // Another file with a tensor of that name where no index says which one counts, or null. Such a
  // tensor is never part of a linear that is served.
  const TensorFile* also_in = nullptr;
  bool served = false;  // it is part of one of Checkpoint::linears()
  // The linear that cannot be read and that it is part of, or null. Where it is neither, the tensor
  // is plainly not quantised: no codes, and no scales of codes.
  const UnservedLinears::value_type* unserved = nullptr;

  bool quantised() const { return served || unserved != nullptr; }
};

// UNAVAILABLE once `cancelled` is true; null: never. Every loop over something that a file chose in
// size asks, which costs a load from memory.
absl::Status CheckCancelled(const std::atomic<bool>* cancelled);

// A system call's error as a status: absl::ErrnoToStatus, but INTERNAL for what it has no code for,
// a disk that fails (EIO) above all. `what` names the file and the call.
absl::Status FromSystem(int error, absl::string_view what);

}  // namespace awqd::model
