// SafetensorsWriter: one safetensors file, written from its beginning to its end.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/tools/encode/target.h"
#include "client/tools/output_file.h"

namespace awqd::tools {

// The header comes first in the file and is known last, so that room for it is kept; what is left
// of it is spaces, which a header may end with. The data begin at a multiple of 8 bytes. Tensors
// whose bytes are no multiple of 8 come last, those of the largest elements first, so that every
// tensor begins at a multiple of its element's size.
class SafetensorsWriter {
 public:
  // Bytes that a tensor of that name takes in the header, at most.
  static int64_t HeaderBytes(absl::string_view name);

  // `header_bytes`: of all tensors that will be added.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(const std::string& path,
                                                                   int64_t header_bytes);

  // Reads and writes it, now or at the end. Names are not compared: that is the folder's business.
  absl::Status Add(NewTensor tensor);
  // Nothing may be added after it.
  absl::Status Finish();

  int64_t data_bytes() const { return data_bytes_; }

 private:
  SafetensorsWriter(std::string path, std::unique_ptr<OutputFile> file, int64_t header_bytes)
      : path_(std::move(path)), file_(std::move(file)), header_bytes_(header_bytes) {}

  absl::Status Write(const NewTensor& tensor);

  const std::string path_;
  const std::unique_ptr<OutputFile> file_;
  const int64_t header_bytes_;
  nlohmann::ordered_json header_;
  std::vector<NewTensor> last_;
  int64_t data_bytes_ = 0;
  std::vector<uint8_t> part_;
};

}  // namespace awqd::tools
