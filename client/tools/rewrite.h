// Rewrite: a folder is read tensor by tensor and written anew, for convert and quantize.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/tools/encode/target.h"
#include "client/tools/folder_writer.h"
#include "client/tools/model.h"

namespace awqd::tools {

// Tensors and files that were copied as they are.
struct Carried {
  int64_t tensors = 0;
  int64_t tensor_bytes = 0;
  std::vector<std::string> files;     // beside tensors and config.json
  std::vector<std::string> left_out;  // files and directories that did not, and why
};

// A folder that was written anew.
struct Rewritten {
  Carried carried;
  int64_t bytes_before = 0, bytes_after = 0;  // of all tensors
};

// INVALID_ARGUMENT naming a tensor that no safetensors file has a type for and that is no part of a
// linear: blocks of a GGUF file. The source's checkpoint has been opened.
absl::Status CheckRewritable(const Model& source);

// The paths of the linears that are written in the place of a tensor; nullopt: it stays as it is.
using Replaced = std::optional<std::vector<std::string>>;
using ReplaceTensor = absl::FunctionRef<Replaced(const std::string& tensor)>;
// The tensors of such a linear, which become "<path>.<suffix>".
using EncodeLinear = absl::FunctionRef<absl::StatusOr<EncodedLinear>(const std::string& path)>;

// Goes through the source's tensors in the order of their place on disk. Each of its files becomes
// one of the same name, a GGUF file model.safetensors. Then writes config.json, with the target's
// settings for `facts` as its quantization_config, if it has any, and `dtype` ("float16"; empty: as
// it is) as the model's type; the index where there is more than one tensor file or the source has
// one; and every other file, but for other forms of the weights, settings of the old format and
// directories.
absl::Status RewriteFolder(const Model& source, const Target& target, const std::string& dtype,
                           FolderFacts facts, ReplaceTensor replaced, EncodeLinear encode,
                           const Progress& progress, FolderWriter* out, Rewritten* report);

// Writes the files of RewriteFolder beside tensors.
absl::Status RewriteRest(const Model& source, const Target& target,
                         const nlohmann::ordered_json& settings, const std::string& dtype,
                         FolderWriter* out, Carried* carried);

// config.json, its keys in their order; of a GGUF file the one that its metadata make.
absl::StatusOr<nlohmann::ordered_json> ReadConfig(const Model& source);

// The facts of `report` for programs.
nlohmann::ordered_json ToJson(const Rewritten& report);

}  // namespace awqd::tools
