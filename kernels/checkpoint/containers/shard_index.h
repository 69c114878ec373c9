// ShardIndex: which file of a checkpoint holds which tensor, as its model.safetensors.index.json
// says.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/file.h"

namespace awqd::model {

constexpr absl::string_view kIndexFile = "model.safetensors.index.json";
constexpr size_t kMaxShards = 1000;  // each stays open during a load

// The names of files are stored once, those of tensors one behind the other: an index of 64 MiB
// takes less than 100 MiB. Move-only.
class ShardIndex {
 public:
  struct Entry {
    absl::string_view tensor;
    absl::string_view file;
  };

  // Reads and parses the file piece by piece. INVALID_ARGUMENT naming the file, and the tensor
  // where it is one that is wrong; UNAVAILABLE once `cancelled`.
  static absl::StatusOr<ShardIndex> Read(const File& file, const std::atomic<bool>* cancelled);

  ShardIndex(ShardIndex&&) = default;
  ShardIndex& operator=(ShardIndex&&) = default;

  std::vector<std::string> file_names() const;  // sorted
  size_t size() const { return tensors_.size(); }
  // As they follow one another in the file.
  Entry operator[](size_t i) const;

 private:
  friend class IndexEvents;
  struct Tensor {
    const char* name;  // in blocks_
    uint16_t name_bytes;
    uint16_t file;  // index into file_of_
  };
  using Files = std::map<std::string, uint16_t, std::less<>>;

  // Expects at most so many tensors.
  explicit ShardIndex(size_t most);

  absl::string_view NameOf(const Tensor& tensor) const { return {tensor.name, tensor.name_bytes}; }
  // False when it is there. Its file is that of the next SetFile.
  bool AddTensor(absl::string_view name);
  absl::Status SetFile(absl::string_view name);

  std::vector<std::string> blocks_;  // names of tensors, each block as large as it was made
  std::vector<Tensor> tensors_;
  std::vector<uint32_t> slots_;  // a hash table by name: 1 + an index into tensors_, or 0
  Files files_;
  std::vector<Files::const_iterator> file_of_;
};

}  // namespace awqd::model
