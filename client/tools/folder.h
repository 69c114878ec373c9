// Folder: a model's directory by its path in the file system, and every tensor in its files.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/checkpoint/repository_root.h"

namespace awqd::tools {

// The files beside config.json that may hold settings of quantisation.
inline constexpr absl::string_view kSettingsFiles[] = {"quant_config.json", "quantize_config.json",
                                                       "hf_quant_config.json"};

struct Folder {
  std::string path;  // as it was given, without slashes at its end
  // What its symbolic links may lead to: the directory above it, and of a snapshot in a cache of
  // the Hub ("models--org--name/snapshots/revision") the one that also has the blobs.
  model::RepositoryRoot root;
  std::string name;  // beneath `root`

  std::string PathOf(absl::string_view file) const;  // "<name>/<file>", as root takes it
};

// NOT_FOUND or INVALID_ARGUMENT naming the path.
absl::StatusOr<Folder> OpenFolder(const std::string& path);

// All of a small file of the folder. NOT_FOUND without it, INVALID_ARGUMENT when it is larger than
// any that is read here.
absl::StatusOr<std::string> ReadText(const Folder& folder, absl::string_view file);

// Every tensor of a folder's safetensors files, or of its GGUF file. Move-only; locations point
// into it.
class Tensors {
 public:
  // INVALID_ARGUMENT naming file and tensor, for a tensor in two files too. Headers together are
  // within the limits of one file, as for a server.
  static absl::StatusOr<Tensors> Open(const Folder& folder);
  // Those of a checkpoint, whose headers are not read again.
  static absl::StatusOr<Tensors> FromCheckpoint(const model::Checkpoint& checkpoint);

  using Map = std::map<absl::string_view, model::TensorLocation>;
  const Map& all() const { return tensors_; }
  // Null when there is none of that name.
  const model::TensorLocation* Find(absl::string_view name) const;
  // Names in the order of their place on disk.
  std::vector<std::string> InOrder() const;
  // In the folder, sorted.
  const std::vector<std::string>& file_names() const { return names_; }
  int64_t total_bytes() const;
  bool gguf() const { return gguf_; }
  // INVALID_ARGUMENT when a file has changed since Open.
  absl::Status CheckUnchanged() const;

 private:
  // INVALID_ARGUMENT for a tensor that another file has.
  absl::Status AddFile(std::shared_ptr<const model::TensorFile> file);

  bool gguf_ = false;
  std::vector<std::string> names_;
  std::vector<std::shared_ptr<const model::TensorFile>> files_;
  Map tensors_;  // keys live in files_
};

// Fills `out` from byte `at` of a tensor on; the tensor has that many.
absl::Status ReadPart(const model::TensorLocation& place, int64_t at, absl::Span<uint8_t> out);

// Whether two tensors, or two files, are alike: type, shape and bytes.
absl::StatusOr<bool> SameBytes(const model::TensorLocation& a, const model::TensorLocation& b);
absl::StatusOr<bool> SameBytes(const model::File& a, const model::File& b);

}  // namespace awqd::tools
