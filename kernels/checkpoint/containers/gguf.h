// Reader of the GGUF container, versions 2 and 3, little endian: counts, metadata, facts of the
// tensors, padding, data.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/checkpoint/file.h"
#include "kernels/formats/format.h"

namespace awqd::model {

// Limits on the sizes that a file claims, checked before anything is allocated for it. Only the
// metadata that GgufFile names is kept.
struct GgufLimits {
  int64_t max_header_bytes = 100'000'000;  // all before the data
  int64_t max_tensors = 1'000'000;
  int64_t max_name_bytes = 1024;  // of a tensor
  int64_t max_key_bytes = 65'535;
  uint32_t max_rank = 4;
  int max_array_depth = 4;
  // As in SafetensorsLimits.
  const std::atomic<bool>* cancelled = nullptr;
};

// A type of tensors: elements lie in blocks of so many along the last dimension.
struct GgufType {
  uint32_t number = 0;     // in the file
  absl::string_view name;  // "Q4_0", as TensorInfo::dtype has it
  int64_t elements = 1;    // of a block
  int64_t bytes = 0;       // of a block
};
// Null for a name that is not known.
const GgufType* GgufTypeNamed(absl::string_view name);

struct GgufFile {
  // Types by their names in ggml, but F16, BF16, F32 and whole numbers as safetensors spells them;
  // a type of a number that is not known is "type 99", and its tensors have 0 bytes here. Shapes
  // are row-major, the reverse of the file's: a linear is [N, K].
  TensorFile tensors;
  std::string architecture;  // general.architecture, at most 64 bytes of UTF-8; may be empty
  int part = 0, parts = 1;   // split.no and split.count: the file is one of `parts`
};

// Reads and checks all that stands before the data. INVALID_ARGUMENT naming the file and the key,
// or the tensor and what is wrong with it; README.md lists the rules.
absl::StatusOr<GgufFile> OpenGguf(File file, const GgufLimits& limits = {});

// Reads general.architecture alone, which is mostly the first key; empty without it. Errors as
// OpenGguf.
absl::StatusOr<std::string> ReadGgufArchitecture(const File& file, const GgufLimits& limits = {});

// Format "gguf" for every linear of these tensors, which may lie in several files. A tensor of blocks that is neither a linear nor all
// experts of one is left out; the note tells of it, of tensors that are not quantised, and of types
// that are not read.
FoundFormat FormatOfGguf(absl::string_view architecture,
                         absl::Span<const TensorMap* const> tensors);

}  // namespace awqd::model
