// Copies and replaces tensors, config.json, and the files beside them.
#include "client/tools/rewrite.h"

#include <iterator>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "client/tools/gguf_metadata.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint_files.h"
#include "kernels/checkpoint/containers/json.h"
#include "kernels/checkpoint/containers/shard_index.h"
#include "kernels/checkpoint/file.h"
#include "kernels/checkpoint/quant_settings.h"
#include "kernels/formats/format.h"

namespace awqd::tools {
namespace {

using Json = nlohmann::ordered_json;

// --- Any folder ---

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

// Whether the model is a file that is given by its own path.
bool IsOneFile(const Folder& folder) { return folder.root.OpenFile(folder.name).ok(); }

// Beside the tensors; none of a model that is one file.
absl::StatusOr<std::vector<std::string>> FilesOf(const Model& source) {
  const Folder& folder = source.folder();
  if (IsOneFile(folder)) return std::vector<std::string>();
  return folder.root.ListDirectory(folder.name);
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

absl::StatusOr<ModelConfig> OpenConfig(const Model& source) {
  const Folder& folder = source.folder();
  if (source.tensors().gguf()) return ReadGgufConfig(source.tensors().first_file());
  if (source.quantised() && IsOneFile(folder)) return ModelConfig{.json = Json::object()};
  AWQD_ASSIGN_OR_RETURN(const std::string text, ReadText(folder, model::kConfigFile));
  // Strict first: the parser below keeps the order of keys, but forgives.
  const auto checked = model::ParseJsonObject(text, kMaxDepth);
  if (!checked.ok()) return Prefixed(folder.PathOf(model::kConfigFile), checked.status());
  const std::optional<std::string> quoted = model::QuotePythonNumbers(text);
  return ModelConfig{
      .json = Json::parse(quoted.value_or(text), nullptr, /*allow_exceptions=*/false),
      .python = quoted.has_value()};
}

void EraseAt(absl::string_view place, Json* object) {
  const std::pair<absl::string_view, absl::string_view> key =
      absl::StrSplit(place, absl::MaxSplits('.', 1));
  const auto it = object->find(std::string(key.first));
  if (it == object->end()) return;
  if (key.second.empty()) {
    object->erase(it);
  } else if (it->is_object()) {
    EraseAt(key.second, &*it);
  }
}

// A tensor that is written as it is.
NewTensor CarriedTensor(const std::string& name, const model::TensorLocation& place) {
  return {.name = name,
          .dtype = place.info->dtype,
          .shape = place.info->shape,
          .bytes = place.info->bytes(),
          .read = [place](int64_t at, absl::Span<uint8_t> to) { return ReadPart(place, at, to); }};
}

// Bytes that the tensors of an encoded linear of that path take in a header, at most.
int64_t EncodedHeaderBytes(const std::string& path) {
  constexpr int64_t kSuffixBytes = 32, kMostTensors = 6;
  return kMostTensors * (SafetensorsWriter::HeaderBytes(path) + kSuffixBytes);
}

absl::Status AddEncoded(const std::string& path, absl::StatusOr<EncodedLinear> encoded,
                        FolderFacts* facts, FolderWriter* out) {
  AWQD_RETURN_IF_ERROR(encoded.status());
  if (encoded->facts.dense) {
    facts->dense.push_back(path);
  } else if (encoded->facts.k > 0) {
    facts->linears.emplace_back(path, encoded->facts);
  }
  for (NewTensor& one : encoded->tensors) {
    one.name = one.name.empty() ? path : absl::StrCat(path, ".", one.name);
    AWQD_RETURN_IF_ERROR(out->AddTensor(std::move(one)));
  }
  return absl::OkStatus();
}

absl::Status RewriteTensors(const Model& source, ReplaceTensor replaced, EncodeLinear encode,
                            const Progress& progress, FolderFacts* facts, FolderWriter* out,
                            Carried* carried) {
  const std::vector<std::string> names = source.tensors().InOrder();
  int64_t done = 0;
  const int64_t total = source.tensors().total_bytes();
  for (size_t begin = 0; begin < names.size();) {
    const std::string file = FileOf(source, names[begin]);
    size_t end = begin;
    int64_t header_bytes = 0;
    for (; end < names.size() && FileOf(source, names[end]) == file; ++end) {
      const Replaced paths = replaced(names[end]);
      if (!paths) header_bytes += SafetensorsWriter::HeaderBytes(names[end]);
      for (const std::string& path : paths.value_or(std::vector<std::string>())) {
        header_bytes += EncodedHeaderBytes(path);
      }
    }
    out->BeginShard(file, header_bytes);
    for (; begin < end; ++begin) {
      const model::TensorLocation& place = *source.tensors().Find(names[begin]);
      const Replaced paths = replaced(names[begin]);
      if (!paths) {
        AWQD_RETURN_IF_ERROR(out->AddTensor(CarriedTensor(names[begin], place)));
        ++carried->tensors;
        carried->tensor_bytes += place.info->bytes();
      }
      for (const std::string& path : paths.value_or(std::vector<std::string>())) {
        const absl::Status status = AddEncoded(path, encode(path), facts, out);
        if (!status.ok()) return Prefixed(absl::StrCat("linear ", Quoted(path)), status);
      }
      done += place.info->bytes();
      progress(done, total);
    }
    AWQD_RETURN_IF_ERROR(out->EndShard());
  }
  return absl::OkStatus();
}

}  // namespace

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

absl::Status RewriteRest(const Model& source, const Target& target, const Json& settings,
                         const std::string& dtype, FolderWriter* out, Carried* carried) {
  const Folder& folder = source.folder();
  AWQD_ASSIGN_OR_RETURN(ModelConfig config, OpenConfig(source));
  Json& json = config.json;
  for (const std::string& place : model::PlacesOfSettings()) EraseAt(place, &json);
  if (!settings.is_null()) json[std::string(target.settings_key)] = settings;
  if (!dtype.empty()) json[json.contains("dtype") ? "dtype" : "torch_dtype"] = dtype;
  std::string text = json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  if (config.python) {
    text = absl::StrReplaceAll(
        text, {{"\"NaN\"", "NaN"}, {"\"Infinity\"", "Infinity"}, {"\"-Infinity\"", "-Infinity"}});
  }
  AWQD_RETURN_IF_ERROR(out->WriteText(std::string(model::kConfigFile), text));
  absl::c_copy(config.left_out, std::back_inserter(carried->left_out));
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> files, FilesOf(source));
  const std::vector<std::string> sources = source.tensors().FileNames();
  const bool indexed = absl::c_linear_search(files, model::kIndexFile);
  if (out->shards() > 1 || (indexed && out->shards() == 1)) AWQD_RETURN_IF_ERROR(out->WriteIndex());
  for (const std::string& name : files) {
    if (name == model::kConfigFile || name == model::kIndexFile ||
        absl::c_linear_search(sources, name)) {
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

absl::StatusOr<Json> ReadConfig(const Model& source) {
  AWQD_ASSIGN_OR_RETURN(ModelConfig config, OpenConfig(source));
  return std::move(config.json);
}

absl::Status RewriteFolder(const Model& source, const Target& target, const std::string& dtype,
                           FolderFacts facts, ReplaceTensor replaced, EncodeLinear encode,
                           const Progress& progress, FolderWriter* out, Rewritten* report) {
  report->bytes_before = source.tensors().total_bytes();
  AWQD_RETURN_IF_ERROR(
      RewriteTensors(source, replaced, encode, progress, &facts, out, &report->carried));
  report->bytes_after = out->tensor_bytes();
  Json settings;  // null
  if (target.settings != nullptr) {
    AWQD_ASSIGN_OR_RETURN(settings, target.settings(facts));
  }
  return RewriteRest(source, target, settings, dtype, out, &report->carried);
}

Json ToJson(const Rewritten& report) {
  return {{"carried_tensors", report.carried.tensors},
          {"carried_files", report.carried.files.size()},
          {"left_out", report.carried.left_out},
          {"bytes_before", report.bytes_before},
          {"bytes_after", report.bytes_after}};
}

}  // namespace awqd::tools
