// Settings and names of peft's adapters; the sum of a low rank.
// Facts: PyPI peft 0.21.2, LoraConfig, tuners/lora and utils/save_and_load.py.
#include "client/tools/adapter.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/checkpoint/containers/json.h"

namespace awqd::tools {
namespace {

using AdapterJson = nlohmann::ordered_json;

constexpr char kConfig[] = "adapter_config.json";
constexpr int kDepth = 32;
constexpr size_t kMostPatterns = 10'000;

// Settings that change nothing of what is merged, or that are read below.
constexpr absl::string_view kKnown[] = {"peft_type",         "r",
                                        "lora_alpha",        "use_rslora",
                                        "rank_pattern",      "alpha_pattern",
                                        "fan_in_fan_out",    "use_dora",
                                        "init_lora_weights", "bias",
                                        "lora_bias",         "modules_to_save",
                                        "target_modules",    "exclude_modules",
                                        "auto_mapping",      "base_model_name_or_path",
                                        "inference_mode",    "layers_pattern",
                                        "lora_dropout",      "layers_to_transform",
                                        "megatron_core",     "megatron_config",
                                        "peft_version",      "qalora_group_size",
                                        "revision",          "runtime_config",
                                        "task_type",         "ensure_weight_tying",
                                        "eva_config",        "corda_config",
                                        "loftq_config",      "lora_ga_config",
                                        "merge_weights",     "enable_lora"};
// Starting points of a training that leave the base as it was; all others change it.
constexpr absl::string_view kInits[] = {"gaussian", "eva", "orthogonal"};

// Behind a module's path, the longest first, and the name in Adapter::Module.
struct PartName {
  absl::string_view ending, part;
};
constexpr PartName kParts[] = {{".lora_A.default.weight", "lora_A"},
                               {".lora_A.weight", "lora_A"},
                               {".lora_B.default.weight", "lora_B"},
                               {".lora_B.weight", "lora_B"},
                               {".lora_B.default.bias", "lora_B.bias"},
                               {".lora_B.bias", "lora_B.bias"},
                               {".lora_embedding_A.default", "lora_embedding_A"},
                               {".lora_embedding_A", "lora_embedding_A"},
                               {".lora_embedding_B.default", "lora_embedding_B"},
                               {".lora_embedding_B", "lora_embedding_B"},
                               {".lora_magnitude_vector.default.weight", "lora_magnitude_vector"},
                               {".lora_magnitude_vector.weight", "lora_magnitude_vector"},
                               {".lora_magnitude_vector", "lora_magnitude_vector"}};

// Null, false, 0, and an empty text, list or object are all "not set".
bool IsSet(const AdapterJson& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() != 0;
  if (value.is_string()) return !value.get_ref<const std::string&>().empty();
  return !value.empty();
}

bool FlagOf(const AdapterJson& config, const char* key) {
  const auto it = config.find(key);
  return it != config.end() && IsSet(*it);
}

std::string Shown(const AdapterJson& value) {
  return Quoted(value.dump(-1, ' ', false, AdapterJson::error_handler_t::replace), 64);
}

absl::Status BadConfig(absl::string_view key, const AdapterJson& got, absl::string_view expected) {
  return BadValue(absl::StrCat(kConfig, ": ", key), Shown(got), expected);
}

absl::Status BadShape(const std::string& name, const std::vector<int64_t>& got,
                      const std::string& expected) {
  return model::BadTensor(name, "got shape [", absl::StrJoin(got, ", "), "], expected ", expected);
}

std::vector<float> Transpose(const std::vector<float>& from, int64_t rows, int64_t cols) {
  std::vector<float> out(from.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) out[j * rows + i] = from[i * cols + j];
  }
  return out;
}

absl::StatusOr<double> AboveZero(const char* key, const AdapterJson& value) {
  if (value.is_number() && value.get<double>() > 0) return value.get<double>();
  return BadConfig(key, value, "a number above 0");
}

}  // namespace

absl::StatusOr<std::vector<float>> ReadFloats(const std::string& name,
                                              const model::TensorLocation& place) {
  if (!IsFloatType(place.info->dtype)) {
    return model::BadTensor(name, "got ", Quoted(place.info->dtype, 16),
                            ", expected F16, BF16 or F32");
  }
  const DType type = FloatTypeNamed(place.info->dtype);
  const int64_t count = place.info->bytes() / SizeOf(type);
  AWQD_RETURN_IF_ERROR(CheckRoom(absl::StrCat("tensor ", Quoted(name)), count, sizeof(float)));
  std::vector<float> out(count);
  if (count > 0) AWQD_RETURN_IF_ERROR(RowsOfTensor(place, 1)(0, count, out.data()));
  return out;
}

void LowRank::SortRows(const RowOrder& order) {
  const std::vector<float> rows = b, factors = magnitude;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t from = order.Source(i, n);
    std::copy_n(rows.begin() + from * r, r, b.begin() + i * r);
    if (!factors.empty()) magnitude[i] = factors[from];
  }
}

void LowRank::AddTo(int64_t begin, int64_t rows, float* w) const {
  std::vector<float> sum(k);
  for (int64_t i = 0; i < rows; ++i) {
    absl::c_fill(sum, 0.0f);
    for (int64_t j = 0; j < r; ++j) {
      const float factor = b[(begin + i) * r + j];
      const float* const row = a.data() + j * k;
      for (int64_t x = 0; x < k; ++x) sum[x] += factor * row[x];
    }
    float* const out = w + i * k;
    for (int64_t x = 0; x < k; ++x) out[x] += scaling * sum[x];
    if (magnitude.empty()) continue;
    double squares = 0;
    for (int64_t x = 0; x < k; ++x) squares += double{out[x]} * out[x];
    const float factor = magnitude[begin + i] / static_cast<float>(std::sqrt(squares));
    for (int64_t x = 0; x < k; ++x) out[x] *= factor;
  }
}

absl::StatusOr<Adapter> Adapter::Open(const std::string& path) {
  Adapter out;
  AWQD_ASSIGN_OR_RETURN(out.folder_, model::OpenModelFolder(path));
  absl::StatusOr<std::string> text = ReadText(out.folder_, kConfig);
  if (!text.ok()) return Prefixed(absl::StrCat("adapter ", Quoted(path, 1024)), text.status());
  const auto checked = model::ParseJsonObject(*text, kDepth);
  if (!checked.ok()) return Prefixed(kConfig, checked.status());
  out.config_ = AdapterJson::parse(*text, nullptr, /*allow_exceptions=*/false);
  AWQD_RETURN_IF_ERROR(out.ReadSettings(out.config_));
  AWQD_ASSIGN_OR_RETURN(out.ranks_, out.ReadNumbers("r", "rank_pattern"));
  AWQD_ASSIGN_OR_RETURN(out.alphas_, out.ReadNumbers("lora_alpha", "alpha_pattern"));
  absl::StatusOr<Tensors> tensors = Tensors::Open(out.folder_);
  if (!tensors.ok()) {
    return Prefixed("adapter (adapter_model.bin is not read)", tensors.status());
  }
  out.tensors_ = *std::move(tensors);
  AWQD_RETURN_IF_ERROR(out.FindModules());
  return out;
}

absl::Status Adapter::ReadSettings(const AdapterJson& config) {
  const auto type = config.find("peft_type");
  if (type == config.end() || *type != "LORA") {
    return BadConfig("peft_type", type == config.end() ? AdapterJson() : *type, "\"LORA\"");
  }
  for (const auto& [key, value] : config.items()) {
    if (absl::c_linear_search(kKnown, key) || !IsSet(value)) continue;
    return absl::UnimplementedError(
        BadConfig(Quoted(key, 64), value, "nothing: it is not known how to merge that").message());
  }
  const auto init = config.find("init_lora_weights");
  if (init == config.end() || !init->is_string()) return absl::OkStatus();
  if (absl::c_linear_search(kInits, init->get<std::string>())) return absl::OkStatus();
  return absl::UnimplementedError(
      BadConfig("init_lora_weights", *init,
                "true, false, gaussian, eva or orthogonal: peft changes the base for others, which "
                "path_initial_model_for_weight_conversion undoes when an adapter is saved")
          .message());
}

absl::Status Adapter::FindModules() {
  for (const auto& [name, place] : tensors_.all()) {
    const std::string whole(name);
    absl::string_view path = name;
    if (!absl::ConsumePrefix(&path, "base_model.model.")) {
      return model::BadTensor(whole, "expected a name that begins with \"base_model.model.\"");
    }
    if (place.also_in != nullptr) return model::BadTensor(whole, "is in two files");
    const auto* const part = absl::c_find_if(
        kParts, [&](const PartName& known) { return absl::EndsWith(path, known.ending); });
    if (part != std::end(kParts)) {
      path.remove_suffix(part->ending.size());
      modules_[std::string(path)].tensors[std::string(part->part)] = place;
      continue;
    }
    if (absl::StrContains(path, "lora_") || absl::StrContains(path, "token_adapter") ||
        absl::StrContains(path, "original_module")) {
      return absl::UnimplementedError(
          model::BadTensor(whole, "it is not known how to merge a tensor of that name").message());
    }
    std::string saved(path);
    for (const char* wrapper : {".base_layer.", ".modules_to_save.default.", ".modules_to_save."}) {
      const size_t at = saved.rfind(wrapper);
      if (at != saved.npos) saved.replace(at, std::strlen(wrapper), ".");
    }
    saved_[saved] = place;
  }
  for (const auto& [path, module] : modules_) {
    const bool embedding = module.tensors.contains("lora_embedding_A");
    for (const char* part : {"A", "B"}) {
      const std::string name = absl::StrCat(embedding ? "lora_embedding_" : "lora_", part);
      if (!module.tensors.contains(name)) {
        return Invalid("module ", Quoted(path), ": tensor ", Quoted(name), " is missing");
      }
    }
    const bool magnitude = module.tensors.contains("lora_magnitude_vector");
    if (magnitude != FlagOf(config_, "use_dora")) {
      return Invalid("module ", Quoted(path), ": got ", magnitude ? "a" : "no",
                     " lora_magnitude_vector, expected ", magnitude ? "none" : "one",
                     " as use_dora says");
    }
  }
  if (!modules_.empty() || !saved_.empty()) return absl::OkStatus();
  return Invalid(folder_.name, ": got no tensors, expected those of an adapter");
}

double Adapter::Numbers::Of(const std::string& path) const {
  const auto found = absl::c_find_if(
      patterns, [&](const auto& entry) { return RE2::FullMatch(path, *entry.first); });
  return found == patterns.end() ? otherwise : found->second;
}

// peft matches a pattern with the end of a path, from a component on.
absl::StatusOr<Adapter::Numbers> Adapter::ReadNumbers(const char* key, const char* patterns) const {
  Numbers out;
  const auto all = config_.find(key);
  AWQD_ASSIGN_OR_RETURN(out.otherwise, AboveZero(key, all == config_.end() ? AdapterJson() : *all));
  const auto some = config_.find(patterns);
  if (some == config_.end() || some->is_null()) return out;
  if (!some->is_object() || some->size() > kMostPatterns) {
    return BadConfig(patterns, *some, absl::StrCat("an object of at most ", kMostPatterns));
  }
  for (const auto& [pattern, value] : some->items()) {
    auto regex = std::make_unique<RE2>(absl::StrCat("(?:.*\\.)?(?:", pattern, ")"), RE2::Quiet);
    if (!regex->ok()) return BadConfig(patterns, pattern, "a regular expression");
    AWQD_ASSIGN_OR_RETURN(const double number, AboveZero(patterns, value));
    out.patterns.emplace_back(std::move(regex), number);
  }
  return out;
}

absl::StatusOr<double> Adapter::Scaling(const std::string& path, int64_t r) const {
  const double rank = ranks_.Of(path), alpha = alphas_.Of(path);
  if (rank != static_cast<double>(r)) {
    return Invalid("lora_A: got a rank of ", r, ", expected ", rank, " as ", kConfig, " says");
  }
  return alpha / (FlagOf(config_, "use_rslora") ? std::sqrt(rank) : rank);
}

absl::StatusOr<LowRank> Adapter::Read(const std::string& path, int64_t rows, int64_t cols) const {
  const auto& tensors = modules_.at(path).tensors;
  const bool embedding = tensors.contains("lora_embedding_A");
  const std::string a_name = embedding ? "lora_embedding_A" : "lora_A";
  const std::string b_name = embedding ? "lora_embedding_B" : "lora_B";
  const model::TensorLocation &a = tensors.at(a_name), &b = tensors.at(b_name);
  if (a.info->shape.size() != 2) return BadShape(a_name, a.info->shape, "two dimensions");
  if (b.info->shape.size() != 2) return BadShape(b_name, b.info->shape, "two dimensions");
  LowRank out = {.k = cols, .n = rows, .r = a.info->shape[0]};
  const std::vector<int64_t> in = {out.r, cols}, in_turned = {out.r, rows};
  const std::vector<int64_t> of = {rows, out.r}, of_turned = {cols, out.r};
  // The weight has its in-features first: of an embedding, and of transformers' Conv1D.
  const bool turned = (embedding || FlagOf(config_, "fan_in_fan_out")) &&
                      a.info->shape == in_turned && b.info->shape == of_turned;
  if (!turned && (embedding || a.info->shape != in)) {
    return BadShape(a_name, a.info->shape,
                    absl::StrCat("[r, ", embedding ? rows : cols, "] for a weight of [", rows, ", ",
                                 cols, "]"));
  }
  if (!turned && b.info->shape != of) {
    return BadShape(
        b_name, b.info->shape,
        absl::StrCat("[", rows, ", ", out.r, "] for a weight of [", rows, ", ", cols, "]"));
  }
  AWQD_ASSIGN_OR_RETURN(const double scaling, Scaling(path, out.r));
  out.scaling = static_cast<float>(scaling);
  AWQD_ASSIGN_OR_RETURN(out.a, ReadFloats(a_name, a));
  AWQD_ASSIGN_OR_RETURN(out.b, ReadFloats(b_name, b));
  if (turned) {
    std::vector<float> left = Transpose(out.a, out.r, rows);
    out.a = Transpose(out.b, cols, out.r);
    out.b = std::move(left);
  }
  const auto magnitude = tensors.find("lora_magnitude_vector");
  if (magnitude == tensors.end()) return out;
  if (turned) {
    return absl::UnimplementedError(
        "lora_magnitude_vector: got one of an embedding or with "
        "fan_in_fan_out, expected one of a weight [N, K]");
  }
  AWQD_ASSIGN_OR_RETURN(out.magnitude, ReadFloats(magnitude->first, magnitude->second));
  if (static_cast<int64_t>(out.magnitude.size()) != rows) {
    return BadShape(magnitude->first, magnitude->second.info->shape, absl::StrCat("[", rows, "]"));
  }
  return out;
}

absl::StatusOr<std::vector<float>> Adapter::ReadBias(const std::string& path) const {
  const auto& tensors = modules_.at(path).tensors;
  const auto bias = tensors.find("lora_B.bias");
  if (bias == tensors.end()) return std::vector<float>();
  AWQD_ASSIGN_OR_RETURN(std::vector<float> out, ReadFloats(bias->first, bias->second));
  AWQD_ASSIGN_OR_RETURN(const double scaling, Scaling(path, tensors.at("lora_A").info->shape[0]));
  for (float& value : out) value *= static_cast<float>(scaling);
  return out;
}

}  // namespace awqd::tools
