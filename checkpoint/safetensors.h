// Reader of the safetensors container: u64 little-endian header length, JSON header, raw tensors.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/file.h"

namespace awqd::model {

// What a file may claim before anything is allocated for it.
struct SafetensorsLimits {
  int64_t max_header_bytes = 100'000'000;
  int64_t max_tensors = 1'000'000;
  size_t max_name_bytes = 1024;
  size_t max_rank = 8;
};

struct TensorInfo {
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // bytes from the first byte after the header
  int64_t end = 0;

  int64_t bytes() const { return end - begin; }
};

using TensorMap = std::map<std::string, TensorInfo, std::less<>>;

// Parses the JSON header of a file with `data_bytes` bytes after it. INVALID_ARGUMENT naming the
// tensor and the rule that it breaks; README.md lists the rules.
absl::StatusOr<TensorMap> ParseSafetensorsHeader(absl::string_view header, int64_t data_bytes,
                                                 const SafetensorsLimits& limits = {});

// An open file whose header has been checked. Const members may be called from any thread.
class SafetensorsFile {
 public:
  // Errors are prefixed with the file's name.
  static absl::StatusOr<SafetensorsFile> Open(File file, const SafetensorsLimits& limits = {});

  const File& file() const { return file_; }
  const TensorMap& tensors() const { return tensors_; }

  // Fills `out`, which has tensor.bytes() bytes. Tensors need not be aligned in the file.
  absl::Status Read(const TensorInfo& tensor, absl::Span<uint8_t> out) const;

 private:
  SafetensorsFile(File file, int64_t data_offset, TensorMap tensors)
      : file_(std::move(file)), data_offset_(data_offset), tensors_(std::move(tensors)) {}

  File file_;
  int64_t data_offset_;
  TensorMap tensors_;
};

}  // namespace awqd::model
