// A folder anew.
#include "client/tools/rewrite.h"

#include <iterator>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/tools/gguf_config.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint_files.h"
#include "kernels/checkpoint/json.h"
#include "kernels/formats/format.h"

namespace awqd::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxDepth = 32;

// Other programs' forms of the weights, which would be the old ones.
constexpr absl::string_view kWeights[] = {".safetensors", ".bin",  ".pt", ".pth",    ".ckpt",
                                          ".gguf",        ".onnx", ".h5", ".msgpack"};

// Types of a GGUF file that safetensors have.
constexpr absl::string_view kPlainTypes[] = {"F16", "BF16", "F32", "F64",
                                             "I8",  "I16",  "I32", "I64"};

std::string FileOf(const Model& source, const std::string& tensor) {
  if (source.tensors().gguf()) return "model.safetensors";
  const std::string& path = source.tensors().Find(tensor)->file->file().name();
  return path.substr(path.rfind('/') + 1);
}

absl::StatusOr<GgufConfig> GgufConfigOf(const Model& source) {
  return ReadGgufConfig(source.tensors().all().begin()->second.file->file());
}

// Beside the tensors; none of a GGUF file that is given by its own path.
absl::StatusOr<std::vector<std::string>> FilesOf(const Model& source) {
  const Folder& folder = source.folder();
  auto files = folder.root.ListDirectory(folder.name);
  if (!files.ok() && source.tensors().gguf()) return std::vector<std::string>();
  return files;
}

// The reason that a file of the source is not copied; empty where it is.
std::string WhyLeftOut(const Model& source, const std::string& name) {
  const auto of_weights = [&](absl::string_view end) { return absl::EndsWith(name, end); };
  if (absl::StartsWith(name, ".")) return "hidden";
  if (absl::c_any_of(kWeights, of_weights) || absl::EndsWith(name, ".index.json")) {
    return "another form of the weights";
  }
  if (absl::c_linear_search(kSettingsFiles, name)) return "settings of the old format";
  if (source.folder().root.ListDirectory(source.folder().PathOf(name)).ok()) return "a directory";
  return "";
}

}  // namespace

NewTensor CarriedTensor(const std::string& name, const model::TensorLocation& place) {
  return {.name = name,
          .dtype = place.info->dtype,
          .shape = place.info->shape,
          .bytes = place.info->bytes(),
          .read = [place](int64_t at, absl::Span<uint8_t> to) { return ReadPart(place, at, to); }};
}

absl::Status CheckRewritable(const Model& source) {
  if (!source.tensors().gguf()) return absl::OkStatus();
  for (const auto& [name, place] : source.tensors().all()) {
    const std::string& dtype = place.info->dtype;
    if (source.IsPart(name) || absl::c_linear_search(kPlainTypes, dtype)) continue;
    const bool read = absl::c_linear_search(kGgufFormat.code_dtypes, dtype);
    return Invalid("tensor ", Quoted(name), ": got ", dtype,
                   read ? ", expected it of a linear's weight, \"<path>.weight\" [N, K]"
                        : ", which is not read, expected one of ",
                   read ? "" : absl::StrJoin(kGgufFormat.code_dtypes, ", "));
  }
  return absl::OkStatus();
}

absl::Status RewriteTensors(const Model& source, FolderWriter* out, Carried* carried,
                            absl::FunctionRef<Rewritten(const std::string& tensor)> plan,
                            absl::FunctionRef<absl::Status(const std::string& tensor)> write,
                            const Progress& progress) {
  const std::vector<std::string> names = source.tensors().InOrder();
  int64_t done = 0;
  for (size_t begin = 0; begin < names.size();) {
    const std::string file = FileOf(source, names[begin]);
    size_t end = begin;
    int64_t header_bytes = 0;
    for (; end < names.size() && FileOf(source, names[end]) == file; ++end) {
      const Rewritten what = plan(names[end]);
      header_bytes += what.carried ? SafetensorsWriter::HeaderBytes(names[end]) : what.header_bytes;
    }
    AWQD_RETURN_IF_ERROR(out->BeginShard(file, header_bytes));
    for (; begin < end; ++begin) {
      const model::TensorLocation& place = *source.tensors().Find(names[begin]);
      if (plan(names[begin]).carried) {
        AWQD_RETURN_IF_ERROR(out->AddTensor(CarriedTensor(names[begin], place)));
        ++carried->tensors;
        carried->tensor_bytes += place.info->bytes();
      } else {
        AWQD_RETURN_IF_ERROR(write(names[begin]));
      }
      done += place.info->bytes();
      progress(done, source.tensors().total_bytes());
    }
    AWQD_RETURN_IF_ERROR(out->EndShard());
  }
  return absl::OkStatus();
}

absl::StatusOr<Json> ReadConfig(const Model& source) {
  const Folder& folder = source.folder();
  if (source.tensors().gguf()) {
    AWQD_ASSIGN_OR_RETURN(GgufConfig made, GgufConfigOf(source));
    return std::move(made.config);
  }
  AWQD_ASSIGN_OR_RETURN(const std::string text, ReadText(folder, model::kConfigFile));
  // Strict first: the parser below keeps the order of keys, but forgives.
  const auto checked = model::ParseJsonObject(text, kMaxDepth);
  if (!checked.ok()) return Prefixed(folder.PathOf(model::kConfigFile), checked.status());
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

absl::Status RewriteRest(const Model& source, const Json& settings, const std::string& dtype,
                         FolderWriter* out, Carried* carried) {
  const Folder& folder = source.folder();
  AWQD_ASSIGN_OR_RETURN(Json config, ReadConfig(source));
  config.erase("quantization_config");
  if (!settings.is_null()) config["quantization_config"] = settings;
  if (!dtype.empty()) config[config.contains("dtype") ? "dtype" : "torch_dtype"] = dtype;
  AWQD_RETURN_IF_ERROR(
      out->WriteText(std::string(model::kConfigFile),
                     config.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"));
  if (source.tensors().gguf()) {
    AWQD_ASSIGN_OR_RETURN(const GgufConfig made, GgufConfigOf(source));
    absl::c_copy(made.left_out, std::back_inserter(carried->left_out));
  }
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> files, FilesOf(source));
  const bool indexed = absl::c_linear_search(files, model::kIndexFile);
  if (indexed || out->shards() > 1) AWQD_RETURN_IF_ERROR(out->WriteIndex());
  for (const std::string& name : files) {
    if (name == model::kConfigFile || name == model::kIndexFile ||
        absl::c_linear_search(source.tensors().file_names(), name)) {
      continue;
    }
    if (const std::string why = WhyLeftOut(source, name); !why.empty()) {
      carried->left_out.push_back(absl::StrCat(name, ": ", why));
      continue;
    }
    AWQD_ASSIGN_OR_RETURN(const model::File file, folder.root.OpenFile(folder.PathOf(name)));
    AWQD_RETURN_IF_ERROR(out->Copy(file, name));
    carried->files.push_back(name);
  }
  return absl::OkStatus();
}

}  // namespace awqd::tools
