// FolderWriter: a model's folder that appears under its name when it is complete.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/files/output_file.h"
#include "client/tools/encode/target.h"
#include "kernels/base/unique_fd.h"
#include "kernels/checkpoint/file.h"

namespace awqd::tools {

// The header comes first in the file and is known last. Room for it is kept, and filled up with
// spaces, which a header may end with. The data begin at a multiple of 8 bytes. Tensors
// whose bytes are no multiple of 8 come last, those of the largest elements first, so that every
// tensor begins at a multiple of its element's size.
class SafetensorsWriter {
 public:
  // Bytes that a tensor of that name takes in the header, at most.
  static int64_t HeaderBytes(absl::string_view name);

  // `header_bytes`: of all tensors that will be added.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(const std::string& path,
                                                                   int64_t header_bytes);

  // Reads and writes it, now or at the end. Names are not compared: FolderWriter does that.
  absl::Status AddTensor(NewTensor tensor);
  // Nothing may be added after it.
  absl::Status Finish();

 private:
  SafetensorsWriter(std::string path, std::unique_ptr<client::OutputFile> file,
                    int64_t header_bytes)
      : path_(std::move(path)), file_(std::move(file)), header_bytes_(header_bytes) {}

  absl::Status Write(const NewTensor& tensor);

  const std::string path_;
  const std::unique_ptr<client::OutputFile> file_;
  const int64_t header_bytes_;
  nlohmann::ordered_json header_;
  std::vector<NewTensor> last_;
  int64_t data_bytes_ = 0;
  std::vector<uint8_t> part_;
};

// Called with the path of each file or directory that is being written, so that a signal that ends
// the process removes it. The result is destroyed when the folder is complete or gone. May be
// empty.
using Guard = std::function<std::shared_ptr<void>(const std::string& path)>;

// Writes into "<path>.partial" and renames it on Commit, or the one file in it. Without Commit, and on signals where the
// guard says so, everything it made is removed.
class FolderWriter {
 public:
  // ALREADY_EXISTS when `path` is there, or "<path>.partial": another run writes it, or one was
  // killed and left it; the message says which.
  // `single_file`: the path is that of one file.
  static absl::StatusOr<std::unique_ptr<FolderWriter>> Create(const std::string& path,
                                                              const Guard& guard,
                                                              bool single_file = false);
  ~FolderWriter();
  FolderWriter(const FolderWriter&) = delete;
  FolderWriter& operator=(const FolderWriter&) = delete;

  // The tensor file that the next tensors go to; nothing of it is made before the first.
  void BeginShard(const std::string& name, int64_t header_bytes);
  // INVALID_ARGUMENT for a second tensor of that name.
  absl::Status AddTensor(NewTensor tensor);
  absl::Status EndShard();

  // model.safetensors.index.json.
  absl::Status WriteIndex();
  // A new file in it, to be closed by the caller.
  absl::StatusOr<std::unique_ptr<client::OutputFile>> CreateFile(const std::string& name);
  absl::Status WriteText(const std::string& name, absl::string_view text);
  absl::Status Copy(const model::File& file, const std::string& name);

  bool single_file() const { return single_file_; }
  const std::string& partial() const { return partial_; }
  int64_t tensor_bytes() const { return tensor_bytes_; }
  int64_t shards() const { return static_cast<int64_t>(shards_.size()); }

  // The folder, or its one file, gets the name.
  absl::Status Commit();

 private:
  FolderWriter(std::string path, const Guard& guard, bool single_file);

  absl::Status Make();
  // The path of a new file in it.
  std::string NewFile(const std::string& name);

  const std::string path_, partial_;
  const Guard guard_;
  const bool single_file_;
  std::vector<std::shared_ptr<void>> guarded_;  // the directory and every file in it
  bool made_ = false;
  UniqueFd lock_;
  std::set<std::string> files_;  // in it
  std::unique_ptr<SafetensorsWriter> shard_;
  std::string shard_name_;
  int64_t header_bytes_ = 0;
  std::set<std::string> shards_;
  std::map<std::string, std::string> weight_map_;  // tensor -> file
  int64_t tensor_bytes_ = 0;
};

}  // namespace awqd::tools
