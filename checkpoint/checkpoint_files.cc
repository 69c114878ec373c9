// Settings, from JSON value by value; index and shards of a checkpoint's directory.
#include "checkpoint/checkpoint_files.h"

#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/json.h"
#include "checkpoint/repository_root.h"
#include "kernels/base/status.h"

namespace awqd::model {
namespace {

using Json = nlohmann::json;

constexpr int kMaxConfigDepth = 32;
// Of all objects and lists together. The longest lists name every module that is not quantised.
constexpr int64_t kMaxValues = 200'000;
constexpr int64_t kMaxConfigBytes = 4 << 20;
constexpr int64_t kMaxIndexBytes = 64 << 20;
constexpr int kMaxIndexDepth = 8;
constexpr size_t kMaxShards = 1000;  // each stays open during a load

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
      return Invalid("got more than ", kMaxValues, " values, expected at most that");
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

absl::StatusOr<std::map<std::string, std::string>> ParseIndex(absl::string_view text) {
  AWQD_ASSIGN_OR_RETURN(const Json index, ParseJsonObject(text, kMaxIndexDepth));
  const auto it = index.find("weight_map");
  if (it == index.end() || !it->is_object()) {
    return absl::InvalidArgumentError("weight_map: expected an object of tensor -> file");
  }
  std::map<std::string, std::string> out;
  for (const auto& [tensor, file] : it->items()) {
    if (!file.is_string()) {
      return Invalid("weight_map: tensor ", Quoted(tensor), ": got a ", file.type_name(),
                     ", expected a file name");
    }
    const std::string& name = file.get_ref<const std::string&>();
    if (!IsPlainFileName(name) || !absl::EndsWith(name, ".safetensors")) {
      return Invalid("weight_map: tensor ", Quoted(tensor), ": got ", Quoted(name),
                     ", expected the name of a .safetensors file in the same directory");
    }
    out.emplace(tensor, name);
  }
  if (out.empty()) return absl::InvalidArgumentError("weight_map: got no tensor, expected some");
  return out;
}

absl::StatusOr<TensorFiles> FromIndex(absl::string_view path, absl::string_view text) {
  absl::StatusOr<std::map<std::string, std::string>> map = ParseIndex(text);
  if (!map.ok()) return Prefixed(path, map.status());
  std::set<std::string> names;
  for (const auto& [tensor, file] : *map) names.insert(file);
  return TensorFiles{{names.begin(), names.end()}, *std::move(map)};
}

absl::StatusOr<TensorFiles> FromDirectory(const FileSource& root, absl::string_view model) {
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> names, root.ListDirectory(model));
  TensorFiles out;
  bool other = false;
  for (const std::string& name : names) {
    if (absl::StartsWith(name, ".")) continue;
    if (absl::EndsWith(name, ".safetensors")) out.names.push_back(name);
    other |= absl::EndsWith(name, ".bin") || absl::EndsWith(name, ".pt");
  }
  if (!out.names.empty()) return out;
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

absl::StatusOr<TensorFiles> FindTensorFiles(const FileSource& root, absl::string_view model) {
  const std::string index_path = PathOf(model, kIndexFile);
  AWQD_ASSIGN_OR_RETURN(const auto index, ReadSmall(root, index_path, kMaxIndexBytes));
  absl::StatusOr<TensorFiles> out =
      index ? FromIndex(index_path, *index) : FromDirectory(root, model);
  if (out.ok() && out->names.size() > kMaxShards) {
    return Invalid(model, ": got ", out->names.size(), " shards, expected at most ", kMaxShards);
  }
  return out;
}

}  // namespace awqd::model
