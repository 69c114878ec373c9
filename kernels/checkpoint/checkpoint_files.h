// The files of a model's folder that hold its tensors, and the map from a tensor's name to its place.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/file.h"
#include "kernels/checkpoint/tensor_names.h"

namespace awqd::model {

struct TensorFiles {
  std::vector<std::shared_ptr<const TensorFile>> files;  // sorted by their names
  std::map<absl::string_view, TensorLocation> tensors;   // keys live in `files` and `respelled`
  RespelledTensors respelled;
  std::string architecture;  // GGUF's general.architecture
  std::string note;          // what of the folder has no effect; mostly empty
};

// Opens the files that the index names, else every *.safetensors of the directory, or `model`
// itself where it is such a file. Their headers together are within the limits of one. The index
// decides which file a tensor is of. A tensor of two files that it does not name has
// TensorLocation::also_in. An index is ignored where none of its files is there but a
// model.safetensors is: it is another model's. INVALID_ARGUMENT for a bad index or file, one file
// under two names, or when there is nothing to read; UNAVAILABLE once `cancelled`.
absl::StatusOr<TensorFiles> OpenTensorFiles(const FileSource& root, absl::string_view model,
                                            const std::atomic<bool>* cancelled = nullptr);

// The error of a model that has no settings, `error`, with the family that names of tensors tell
// of: UNIMPLEMENTED where it is one that is not read. UNAVAILABLE once `cancelled`. `error` alone
// where no tensor tells, or the files cannot be opened.
absl::Status NameFamily(const FileSource& root, absl::string_view model, const absl::Status& error,
                        const std::atomic<bool>* cancelled = nullptr);

// Finds the GGUF files of the repository's entry `model`, as paths beneath the root:
//   - the entry itself where it is a file ("a.gguf"), with the parts that follow a first part
//     ("a-00001-of-00003.gguf");
//   - the GGUF model of a directory that has no *.safetensors beside a config.json. Projectors
//     (general.architecture clip) do not count beside another file.
// Empty for every other entry, also for one that does not exist. INVALID_ARGUMENT for a directory
// with several models, and for a model of which a part is missing.
absl::StatusOr<std::vector<std::string>> FindGguf(const FileSource& root, absl::string_view model);

// Opens those files. INVALID_ARGUMENT where their metadata says other parts than their names.
absl::StatusOr<TensorFiles> OpenGgufFiles(const FileSource& root,
                                          const std::vector<std::string>& paths,
                                          const std::atomic<bool>* cancelled = nullptr);

// OK where the repository's entry is a model: a directory with a config.json, what FindGguf finds, or
// a file of safetensors with layers that ComfyUI quantised. NOT_FOUND where it is none, a part of a GGUF model behind its first too; another error
// where it is one that cannot be opened.
absl::Status FindModel(const FileSource& root, absl::string_view model);

}  // namespace awqd::model
