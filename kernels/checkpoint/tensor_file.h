// TensorFile: an open file of tensors, whatever container it is of, whose header has been checked.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/checkpoint/file.h"

namespace awqd::model {

struct TensorInfo {
  std::string dtype;           // safetensors spelling; of GGUF's blocks "Q4_0", ...
  std::vector<int64_t> shape;  // row-major, in elements
  int64_t begin = 0;           // bytes from the first byte of data
  int64_t end = 0;

  int64_t bytes() const { return end - begin; }
};

using TensorMap = std::map<std::string, TensorInfo, std::less<>>;

// Const members may be called from any thread.
class TensorFile {
 public:
  // Every tensor lies within the file; data begins at byte `data_offset`.
  TensorFile(File file, int64_t data_offset, TensorMap tensors)
      : file_(std::move(file)), data_offset_(data_offset), tensors_(std::move(tensors)) {}

  const File& file() const { return file_; }
  const TensorMap& tensors() const { return tensors_; }
  int64_t header_bytes() const { return data_offset_; }  // all before the data

  // Fills `out`, which has tensor.bytes() bytes. Tensors need not be aligned in the file.
  absl::Status Read(const TensorInfo& tensor, absl::Span<uint8_t> out,
                    const std::atomic<bool>* cancelled = nullptr) const;

 private:
  File file_;
  int64_t data_offset_;
  TensorMap tensors_;
};

}  // namespace awqd::model
