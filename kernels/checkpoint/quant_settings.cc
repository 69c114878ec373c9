// From JSON to settings, value by value.
#include "kernels/checkpoint/quant_settings.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/containers/json.h"

namespace awqd::model {
namespace {

using Json = nlohmann::json;

constexpr int kMaxConfigDepth = 32;
// The longest lists name every expert of every layer.
constexpr int64_t kMaxConfigBytes = 64 << 20;

// Where settings of a part of the model stand. "": those of the model itself.
constexpr absl::string_view kParts[] = {"",
                                        "text_config",
                                        "llm_config",
                                        "language_config",
                                        "language_model_config",
                                        "thinker_config.text_config",
                                        "thinker_config"};
constexpr absl::string_view kKey = "quantization_config";
constexpr absl::string_view kOldKey = "compression_config";  // compressed-tensors, in 2024
constexpr absl::string_view kMlxKey = "quantization";        // before kKey, which may be the base's

// quantize_config.json without quant_method is GPTQ's.
struct SideFile {
  absl::string_view name;
  absl::string_view default_method;
};
constexpr SideFile kSideFiles[] = {{"quant_config.json", "awq"},
                                   {"quantize_config.json", "gptq"},
                                   {"quanto_qmap.json", "quanto"},
                                   {kModelOptFile, "modelopt"}};

// Walks a document in the order of its text, which is that of `keys`.
class Converter {
 public:
  explicit Converter(const KeysInOrder* keys) : keys_(*keys) {}

  // Converts the value that lies under these keys, one in the other. All of them are there.
  Setting ConvertAt(const Json& object, absl::Span<const absl::string_view> path) {
    if (path.empty()) return Convert(object);
    for (const std::string& key : NextKeys()) {
      if (key == path.front()) break;
      Skip(object.at(key));
    }
    return ConvertAt(object.at(std::string(path.front())), path.subspan(1));
  }

 private:
  // The names of the next object's members, once.
  const std::vector<std::string>& NextKeys() { return keys_[object_++]; }
  void Skip(const Json& value) {
    if (value.is_object()) ++object_;
    if (!value.is_structured()) return;
    for (const Json& member : value) Skip(member);
  }
  Setting Convert(const Json& value) {
    Setting out;
    if (value.is_object()) {
      out.keys = NextKeys();
      for (const std::string& key : out.keys) out.members[key] = Convert(value.at(key));
      return out;
    }
    if (value.is_array()) {
      out.kind = Setting::Kind::kList;
      for (const Json& entry : value) out.list.push_back(Convert(entry));
      return out;
    }
    if (value.is_string()) return Setting::String(value.get<std::string>());
    if (value.is_null()) return Setting{Setting::Kind::kNull};
    return Setting{Setting::Kind::kLiteral, value.dump()};
  }

  const KeysInOrder& keys_;
  size_t object_ = 0;  // the next one
};

// The whole of a small file; nothing when it does not exist.
absl::StatusOr<std::optional<std::string>> ReadSmall(const FileSource& root, absl::string_view path,
                                                     int64_t max_bytes) {
  absl::StatusOr<File> file = root.OpenFile(path);
  if (absl::IsNotFound(file.status())) return std::optional<std::string>();
  if (!file.ok()) return file.status();
  AWQD_RETURN_IF_ERROR(file->CheckNoLfsPointer());
  if (file->size() > max_bytes) {
    return Invalid(path, ": got ", file->size(), " bytes, expected at most ", max_bytes);
  }
  std::string text(file->size(), '\0');
  AWQD_RETURN_IF_ERROR(
      file->ReadAt(0, absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size())));
  return std::optional<std::string>(std::move(text));
}

// Null when one of the keys is absent, or its value is null.
const Json* FindValue(const Json& object, absl::Span<const absl::string_view> path) {
  const Json* out = &object;
  for (const absl::string_view key : path) {
    const auto it = out->is_object() ? out->find(std::string(key)) : out->end();
    if (it == out->end() || it->is_null()) return nullptr;
    out = &*it;
  }
  return out;
}

// Whether settings are MLX's. Others have something else under kMlxKey.
bool AreOfMlx(const Json& value) {
  return FindValue(value, {"group_size"}) != nullptr && FindValue(value, {"bits"}) != nullptr;
}

// A member that is a whole number from 1 to 2^20; else `otherwise`.
int64_t FindCount(const Json& object, const std::string& name, int64_t otherwise) {
  constexpr int64_t kMost = int64_t{1} << 20;
  const Json* const value = FindValue(object, {name});
  const bool count =
      value != nullptr && value->is_number_unsigned() && *value >= 1 && *value <= kMost;
  return count ? value->get<int64_t>() : otherwise;
}

// The count of that name in an object and in the settings of parts in it; 0 where one has none, or
// two differ.
int64_t FindSize(const Json& object, const std::string& name) {
  int64_t out = FindCount(object, name, 0);
  for (const auto& [key, member] : object.items()) {
    if (!member.is_object() || !absl::EndsWith(key, "_config") || key == kKey) continue;
    const int64_t of_part = FindSize(member, name);
    if (of_part == 0 || (out != 0 && of_part != out)) return 0;
    out = of_part;
  }
  return out;
}

void AssumeMethod(absl::string_view method, Setting* settings) {
  if (FindSetting(*settings, "quant_method") != nullptr) return;
  settings->members["quant_method"] = Setting::String(std::string(method));
}

}  // namespace

std::vector<std::string> PlacesOfSettings() {
  std::vector<std::string> out;
  for (const absl::string_view part : kParts) {
    for (const absl::string_view key : {kMlxKey, kKey, kOldKey}) {
      out.push_back(absl::StrCat(part, part.empty() ? "" : ".", key));
    }
  }
  return out;
}

absl::StatusOr<std::optional<QuantSettings>> ParseConfigJson(absl::string_view text) {
  KeysInOrder keys;
  AWQD_ASSIGN_OR_RETURN(const Json config, ParseJsonObject(text, kMaxConfigDepth, &keys));
  for (const std::string& place : PlacesOfSettings()) {
    const std::vector<absl::string_view> path = absl::StrSplit(place, '.');
    const Json* const value = FindValue(config, path);
    if (value == nullptr || (path.back() == kMlxKey && !AreOfMlx(*value))) continue;
    if (!value->is_object()) {
      return Invalid(place, ": got ", Quoted(value->type_name()), ", expected an object");
    }
    QuantSettings out = {Converter(&keys).ConvertAt(config, path), place};
    if (path.back() == kOldKey) AssumeMethod("compressed-tensors", &out.settings);
    return std::optional<QuantSettings>(std::move(out));
  }
  return std::optional<QuantSettings>();
}

absl::StatusOr<Setting> ParseSettingsJson(absl::string_view text) {
  KeysInOrder keys;
  AWQD_ASSIGN_OR_RETURN(const Json object, ParseJsonObject(text, kMaxConfigDepth, &keys));
  return Converter(&keys).ConvertAt(object, {});
}

absl::StatusOr<Setting> ParseQuantConfigJson(absl::string_view text,
                                             absl::string_view default_method) {
  AWQD_ASSIGN_OR_RETURN(Setting out, ParseSettingsJson(text));
  AssumeMethod(default_method, &out);
  return out;
}

absl::StatusOr<std::optional<QuantSettings>> ReadConfigSettings(const FileSource& root,
                                                                absl::string_view model) {
  const std::string path = absl::StrCat(model, "/", kConfigFile);
  AWQD_ASSIGN_OR_RETURN(const auto text, ReadSmall(root, path, kMaxConfigBytes));
  if (!text) {
    return absl::NotFoundError(
        absl::StrCat("model ", Quoted(model), ": no ", path, " beneath the repository"));
  }
  absl::StatusOr<std::optional<QuantSettings>> out = ParseConfigJson(*text);
  if (!out.ok()) return Prefixed(path, out.status());
  if (*out) (*out)->place = absl::StrCat(path, ": ", (*out)->place);
  return out;
}

std::vector<AttentionRows> ReadAttentionRows(const FileSource& root, absl::string_view model) {
  std::vector<AttentionRows> out;
  const auto text = ReadSmall(root, absl::StrCat(model, "/", kConfigFile), kMaxConfigBytes);
  if (!text.ok() || !*text) return out;
  const absl::StatusOr<Json> config = ParseJsonObject(**text, kMaxConfigDepth, nullptr);
  if (!config.ok()) return out;
  for (const absl::string_view part : kParts) {
    const std::vector<absl::string_view> path = absl::StrSplit(part, '.', absl::SkipEmpty());
    const Json* const object = FindValue(*config, path);
    if (object == nullptr) continue;
    for (const std::string kind : {"", "swa_"}) {
      const int64_t heads = FindCount(*object, kind + "num_attention_heads", 0);
      if (heads == 0) continue;
      const int64_t hidden = FindCount(*object, "hidden_size", 0);
      const int64_t key_value_heads = FindCount(*object, kind + "num_key_value_heads", heads);
      const int64_t head = FindCount(*object, kind + "head_dim", hidden / heads);
      const int64_t value_head = FindCount(*object, kind + "v_head_dim", head);
      out.push_back(
          {heads * head, key_value_heads * head, key_value_heads * value_head, key_value_heads});
    }
  }
  return out;
}

int64_t ReadSize(const FileSource& root, absl::string_view model, const std::string& name) {
  const auto text = ReadSmall(root, absl::StrCat(model, "/", kConfigFile), kMaxConfigBytes);
  if (!text.ok() || !*text) return 0;
  const absl::StatusOr<Json> config = ParseJsonObject(**text, kMaxConfigDepth, nullptr);
  return config.ok() ? FindSize(*config, name) : 0;
}

absl::StatusOr<std::optional<QuantSettings>> ReadSideSettings(const FileSource& root,
                                                              absl::string_view model,
                                                              bool modelopt_alone) {
  for (const SideFile& side : kSideFiles) {
    if (modelopt_alone && side.name != kModelOptFile) continue;
    const std::string path = absl::StrCat(model, "/", side.name);
    AWQD_ASSIGN_OR_RETURN(const auto text, ReadSmall(root, path, kMaxConfigBytes));
    if (!text) continue;
    absl::StatusOr<Setting> out = ParseQuantConfigJson(*text, side.default_method);
    if (!out.ok()) return Prefixed(path, out.status());
    return std::optional<QuantSettings>({*std::move(out), path});
  }
  return std::optional<QuantSettings>();
}

}  // namespace awqd::model
