// Settings, from JSON value by value; index and shards of a checkpoint's directory.
#include "kernels/checkpoint/checkpoint_files.h"

#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/json.h"
#include "kernels/checkpoint/safetensors.h"

namespace awqd::model {
namespace {

using Json = nlohmann::json;

constexpr absl::string_view kGgufExtension = ".gguf";
constexpr int kMaxConfigDepth = 32;
// Of all objects and lists together. The longest lists name every module that is not quantised.
constexpr int64_t kMaxValues = 200'000;
constexpr int64_t kMaxConfigBytes = 4 << 20;

// Walks a document in the order of its text, which is that of `keys`.
class Converter {
 public:
  explicit Converter(const KeysInOrder* keys) : keys_(*keys) {}

  // The names of the next object's members, once.
  const std::vector<std::string>& NextKeys() { return keys_[object_++]; }
  void Skip(const Json& value) {
    if (value.is_object()) ++object_;
    if (!value.is_structured()) return;
    for (const Json& member : value) Skip(member);
  }
  absl::StatusOr<Setting> Convert(const Json& value) {
    if (++values_ > kMaxValues) {
      return Invalid("got more than ", kMaxValues, " values, the limit");
    }
    Setting out;
    if (value.is_object()) {
      out.keys = NextKeys();
      for (const std::string& key : out.keys) {
        AWQD_ASSIGN_OR_RETURN(out.members[key], Convert(value.at(key)));
      }
      return out;
    }
    if (value.is_array()) {
      out.kind = Setting::Kind::kList;
      for (const Json& entry : value) {
        AWQD_ASSIGN_OR_RETURN(Setting converted, Convert(entry));
        out.list.push_back(std::move(converted));
      }
      return out;
    }
    if (value.is_string()) return Setting::String(value.get<std::string>());
    if (value.is_null()) return Setting{Setting::Kind::kNull};
    return Setting{Setting::Kind::kLiteral, value.dump()};
  }

 private:
  const KeysInOrder& keys_;
  size_t object_ = 0;  // the next one
  int64_t values_ = 0;
};

std::string PathOf(absl::string_view model, absl::string_view file) {
  return absl::StrCat(model, "/", file);
}

// The whole of a small file; nothing when it does not exist.
absl::StatusOr<std::optional<std::string>> ReadSmall(const FileSource& root, absl::string_view path,
                                                     int64_t max_bytes) {
  absl::StatusOr<File> file = root.OpenFile(path);
  if (absl::IsNotFound(file.status())) return std::optional<std::string>();
  if (!file.ok()) return file.status();
  if (file->size() > max_bytes) {
    return Invalid(path, ": got ", file->size(), " bytes, expected at most ", max_bytes);
  }
  std::string text(file->size(), '\0');
  AWQD_RETURN_IF_ERROR(
      file->ReadAt(0, absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size())));
  return std::optional<std::string>(std::move(text));
}

absl::StatusOr<std::optional<ShardIndex>> ReadIndex(const FileSource& root, absl::string_view model,
                                                    const std::atomic<bool>* cancelled) {
  const absl::StatusOr<File> file = root.OpenFile(PathOf(model, kIndexFile));
  if (absl::IsNotFound(file.status())) return std::optional<ShardIndex>();
  if (!file.ok()) return file.status();
  return ShardIndex::Read(*file, cancelled);
}

// One file under several names would take memory for each of them.
absl::Status CheckNotOpen(const File& file,
                          absl::Span<const std::shared_ptr<const TensorFile>> open) {
  for (const auto& other : open) {
    if (!file.SameFileAs(other->file())) continue;
    return Invalid(other->file().shown_name(), ": got the same file as ", file.shown_name(),
                   ", expected each shard once");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> NamesInDirectory(const FileSource& root,
                                                          absl::string_view model) {
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> names, root.ListDirectory(model));
  std::vector<std::string> out;
  bool other = false;
  for (const std::string& name : names) {
    if (absl::StartsWith(name, ".")) continue;
    if (absl::EndsWith(name, ".safetensors")) out.push_back(name);
    other |= absl::EndsWith(name, ".bin") || absl::EndsWith(name, ".pt");
  }
  if (out.size() > kMaxShards) {
    return Invalid(model, ": got ", out.size(), " shards, expected at most ", kMaxShards);
  }
  if (!out.empty()) return out;
  return Invalid(model, ": got no *.safetensors file, expected at least one",
                 other ? " (.bin and .pt files are not read: convert them)" : "");
}

struct SideFile {
  absl::string_view name;
  absl::string_view default_method;  // quantize_config.json without quant_method is GPTQ's
};
constexpr SideFile kSideFiles[] = {{"quant_config.json", "awq"},
                                   {"quantize_config.json", "gptq"},
                                   {"hf_quant_config.json", "modelopt"}};

}  // namespace

absl::StatusOr<std::optional<Setting>> ParseConfigJson(absl::string_view text) {
  constexpr char kKey[] = "quantization_config";
  KeysInOrder keys;
  AWQD_ASSIGN_OR_RETURN(const Json config, ParseJsonObject(text, kMaxConfigDepth, &keys));
  const auto it = config.find(kKey);
  if (it == config.end() || it->is_null()) return std::optional<Setting>();
  if (!it->is_object()) {
    return Invalid(kKey, ": got ", Quoted(it->type_name()), ", expected an object");
  }
  Converter converter(&keys);
  for (const std::string& key : converter.NextKeys()) {
    if (key == kKey) break;
    converter.Skip(config.at(key));
  }
  AWQD_ASSIGN_OR_RETURN(Setting out, converter.Convert(*it));
  return std::optional<Setting>(std::move(out));
}

absl::StatusOr<Setting> ParseQuantConfigJson(absl::string_view text,
                                             absl::string_view default_method) {
  KeysInOrder keys;
  AWQD_ASSIGN_OR_RETURN(const Json config, ParseJsonObject(text, kMaxConfigDepth, &keys));
  AWQD_ASSIGN_OR_RETURN(Setting out, Converter(&keys).Convert(config));
  if (FindSetting(out, "quant_method") == nullptr) {
    out.members["quant_method"] = Setting::String(std::string(default_method));
  }
  return out;
}

absl::StatusOr<QuantSettings> ReadQuantSettings(const FileSource& root, absl::string_view model) {
  const std::string config_path = PathOf(model, kConfigFile);
  AWQD_ASSIGN_OR_RETURN(const auto text, ReadSmall(root, config_path, kMaxConfigBytes));
  if (!text) {
    return absl::NotFoundError(
        absl::StrCat("model ", Quoted(model), ": no ", config_path, " beneath the repository"));
  }
  absl::StatusOr<std::optional<Setting>> config = ParseConfigJson(*text);
  if (!config.ok()) return Prefixed(config_path, config.status());
  if (*config) {
    return QuantSettings{**std::move(config), absl::StrCat(config_path, ": quantization_config")};
  }
  for (const SideFile& side : kSideFiles) {
    const std::string path = PathOf(model, side.name);
    AWQD_ASSIGN_OR_RETURN(const auto side_text, ReadSmall(root, path, kMaxConfigBytes));
    if (!side_text) continue;
    absl::StatusOr<Setting> out = ParseQuantConfigJson(*side_text, side.default_method);
    if (!out.ok()) return Prefixed(path, out.status());
    return QuantSettings{*std::move(out), path};
  }
  return Invalid(config_path, ": quantization_config: got nothing, expected it here or a ",
                 kSideFiles[0].name, ", ", kSideFiles[1].name, " or ", kSideFiles[2].name,
                 " beside it (not a quantised checkpoint?)");
}

absl::StatusOr<TensorFiles> OpenTensorFiles(const FileSource& root, absl::string_view model,
                                            const std::atomic<bool>* cancelled) {
  TensorFiles out;
  AWQD_ASSIGN_OR_RETURN(out.index, ReadIndex(root, model, cancelled));
  if (out.index) {
    out.names = out.index->file_names();
  } else {
    AWQD_ASSIGN_OR_RETURN(out.names, NamesInDirectory(root, model));
  }
  SafetensorsLimits left = {.cancelled = cancelled};  // what all files together may claim
  for (const std::string& name : out.names) {
    absl::StatusOr<File> file = root.OpenFile(PathOf(model, name));
    if (absl::IsNotFound(file.status())) {
      return Invalid(model, ": shard ", Quoted(name), " is missing, expected every file that ",
                     kIndexFile, " names");
    }
    if (!file.ok()) return file.status();
    AWQD_RETURN_IF_ERROR(CheckNotOpen(*file, out.files));
    AWQD_ASSIGN_OR_RETURN(TensorFile shard, OpenSafetensors(*std::move(file), left));
    left.max_header_bytes -= shard.header_bytes();
    left.max_tensors -= static_cast<int64_t>(shard.tensors().size());
    out.files.push_back(std::make_shared<const TensorFile>(std::move(shard)));
  }
  return out;
}

absl::StatusOr<std::string> FindGguf(const FileSource& root, absl::string_view model) {
  const absl::StatusOr<std::vector<std::string>> names = root.ListDirectory(model);
  if (!names.ok()) return std::string(absl::EndsWith(model, kGgufExtension) ? model : "");
  if (absl::c_linear_search(*names, kConfigFile)) return std::string();
  std::vector<std::string> found;
  for (const std::string& name : *names) {
    if (name.front() != '.' && absl::EndsWith(name, kGgufExtension)) found.push_back(name);
  }
  if (found.empty()) return std::string();
  if (found.size() == 1) return absl::StrCat(model, "/", found[0]);
  return Invalid(model, ": got ", found.size(), " *.gguf files, such as ", Quoted(found[0]),
                 " and ", Quoted(found[1]), ", expected one, or a ", kConfigFile);
}

absl::Status FindModel(const FileSource& root, absl::string_view model) {
  AWQD_ASSIGN_OR_RETURN(const std::string gguf, FindGguf(root, model));
  return root.OpenFile(gguf.empty() ? absl::StrCat(model, "/", kConfigFile) : gguf).status();
}

}  // namespace awqd::model
