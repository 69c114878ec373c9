// A GGUF file as a checkpoint: what stands for the settings that other checkpoints have in JSON.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/file_source.h"
#include "kernels/checkpoint/gguf.h"
#include "kernels/formats/format.h"

namespace awqd::model {

// The path beneath the root of the GGUF file that the repository's entry `model` is ("a.gguf") or
// holds: a directory with one *.gguf and no config.json. Empty for every other entry, also for one
// that does not exist. INVALID_ARGUMENT for a directory with several *.gguf and no config.json.
absl::StatusOr<std::string> FindGguf(const FileSource& root, absl::string_view model);

// OK where the repository's entry is a model: a directory with a config.json, or what FindGguf
// finds. NOT_FOUND where it is none; another error where it is one that cannot be opened.
absl::Status FindModel(const FileSource& root, absl::string_view model);

// Format "gguf" for every linear of the file. A tensor of blocks that is neither a linear nor all
// experts of one is left out; the note tells of it, of tensors that are not quantised, and of types
// that are not read.
FoundFormat FormatOfGguf(const GgufFile& file);

}  // namespace awqd::model
