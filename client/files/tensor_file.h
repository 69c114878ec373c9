// TensorFileWriter: one tensor to a .npy or .safetensors file, in pieces, all or nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/files/output_file.h"
#include "client/remove_on_signal.h"
#include "client/tensor.h"

namespace awqd::client {

enum class TensorFileFormat { kNpy, kSafetensors };

// By the extension. INVALID_ARGUMENT for another one, and for BF16 as .npy.
absl::StatusOr<TensorFileFormat> TensorFileFormatOf(absl::string_view path, DType dtype);

// Writes next to the target under a hidden name and renames on Commit, so that the target never
// holds half a tensor. Without Commit the hidden file is removed, also on signals where
// RemoveFilesOnSignals was called. Not thread-safe.
class TensorFileWriter {
 public:
  // `tensor_name` is the key within .safetensors; .npy has none.
  static absl::StatusOr<std::unique_ptr<TensorFileWriter>> Create(
      const std::string& path, absl::string_view tensor_name, DType dtype,
      const std::vector<int64_t>& shape);
  ~TensorFileWriter();
  TensorFileWriter(const TensorFileWriter&) = delete;
  TensorFileWriter& operator=(const TensorFileWriter&) = delete;

  absl::Status Append(absl::string_view bytes);
  // FAILED_PRECONDITION unless exactly the tensor's bytes were appended.
  absl::Status Commit();

 private:
  TensorFileWriter(std::string path, std::string partial, std::unique_ptr<OutputFile> file,
                   int64_t remaining);

  const std::string path_;
  const std::string partial_;
  RemoveOnSignal on_signal_;
  std::unique_ptr<OutputFile> file_;  // null once it has its name
  int64_t remaining_;                 // bytes of data still to come
};

}  // namespace awqd::client
