// What convert and quantize share: a folder read tensor by tensor and written anew.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/tools/folder_writer.h"
#include "client/tools/model.h"

namespace awqd::tools {

// What came along as it was.
struct Carried {
  int64_t tensors = 0;
  int64_t tensor_bytes = 0;
  std::vector<std::string> files;     // beside tensors and config.json
  std::vector<std::string> left_out;  // files and directories that did not, and why
};

// What a tensor of the source becomes.
struct Rewritten {
  bool carried = false;      // it stays as it is
  int64_t header_bytes = 0;  // of what is written in its place, at most; may be 0
};

// INVALID_ARGUMENT naming a tensor that no safetensors file has a type for and that is no part of a
// linear: blocks of a GGUF file. The source's checkpoint has been opened.
absl::Status CheckRewritable(const Model& source);

// Goes through the source's tensors in the order of their place on disk, each of its files becoming
// one of the same name, a GGUF file model.safetensors. `plan` says what becomes of a tensor;
// `write` adds what replaces it to `out`, called for each that is not carried.
absl::Status RewriteTensors(const Model& source, FolderWriter* out, Carried* carried,
                            absl::FunctionRef<Rewritten(const std::string& tensor)> plan,
                            absl::FunctionRef<absl::Status(const std::string& tensor)> write,
                            const Progress& progress);

// Writes config.json, with `settings` as its quantization_config or, where that is null, without
// any, and `dtype` ("float16"; empty: as it is) as the model's type; the index where there is more
// than one tensor file or the source has one; and every other file, but for other forms of the
// weights, settings of the old format and directories.
absl::Status RewriteRest(const Model& source, const nlohmann::ordered_json& settings,
                         const std::string& dtype, FolderWriter* out, Carried* carried);

// The tensor of a file, to be written as it is.
NewTensor CarriedTensor(const std::string& name, const model::TensorLocation& place);

// config.json, its keys in their order; of a GGUF file the one that its metadata make.
absl::StatusOr<nlohmann::ordered_json> ReadConfig(const Model& source);

}  // namespace awqd::tools
