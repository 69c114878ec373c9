// Reads and writes metadata; tables of names.
#include "client/tools/gguf_metadata.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <numbers>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/checkpoint/containers/gguf.h"
#include "kernels/checkpoint/containers/gguf_input.h"
#include "kernels/checkpoint/experts.h"

namespace awqd::tools {
namespace {

// --- config.json of metadata ---

using Json = nlohmann::ordered_json;

using Value = absl::StatusOr<Json>;

constexpr uint64_t kMostValues = 256;   // of an array that is kept
constexpr uint64_t kMostKeys = 10'000;  // each is looked for among those before it

// The name of a key in config.json. Keys of the model stand behind "<architecture>.".
struct KeyName {
  absl::string_view gguf, config;
};
constexpr KeyName kModelNames[] = {{"vocab_size", "vocab_size"},
                                   {"context_length", "max_position_embeddings"},
                                   {"embedding_length", "hidden_size"},
                                   {"block_count", "num_hidden_layers"},
                                   {"feed_forward_length", "intermediate_size"},
                                   {"attention.head_count", "num_attention_heads"},
                                   {"attention.head_count_kv", "num_key_value_heads"},
                                   {"attention.key_length", "head_dim"},
                                   {"attention.sliding_window", "sliding_window"},
                                   {"attention.layer_norm_rms_epsilon", "rms_norm_eps"},
                                   {"attention.layer_norm_epsilon", "layer_norm_eps"},
                                   {"rope.freq_base", "rope_theta"},
                                   {"expert_count", "num_experts"},
                                   {"expert_used_count", "num_experts_per_tok"}};
constexpr KeyName kTokenNames[] = {{"tokenizer.ggml.bos_token_id", "bos_token_id"},
                                   {"tokenizer.ggml.eos_token_id", "eos_token_id"},
                                   {"tokenizer.ggml.padding_token_id", "pad_token_id"}};

template <typename T>
Value Number(model::GgufInput* in) {
  AWQD_ASSIGN_OR_RETURN(const T value, in->Number<T>("value"));
  return Json(value);
}

// The shortest number that is the same FP32: 1e-05, not 9.999999747378752e-06.
Value Float(model::GgufInput* in) {
  AWQD_ASSIGN_OR_RETURN(const float value, in->Number<float>("value"));
  char text[32];
  const std::to_chars_result end = std::to_chars(text, text + sizeof(text) - 1, value);
  *end.ptr = '\0';
  return Json(std::strtod(text, nullptr));
}

Value Bool(model::GgufInput* in) {
  AWQD_ASSIGN_OR_RETURN(const uint8_t value, in->Number<uint8_t>("value"));
  return Json(value != 0);
}

Value Text(model::GgufInput* in) {
  AWQD_ASSIGN_OR_RETURN(std::string text, in->Text(static_cast<uint64_t>(in->left()), "value"));
  return Json(std::move(text));
}

// By a type's number; null for arrays.
using ReadValue = Value (*)(model::GgufInput*);
constexpr ReadValue kRead[] = {Number<uint8_t>,
                               Number<int8_t>,
                               Number<uint16_t>,
                               Number<int16_t>,
                               Number<uint32_t>,
                               Number<int32_t>,
                               Float,
                               Bool,
                               Text,
                               nullptr,
                               Number<uint64_t>,
                               Number<int64_t>,
                               Number<double>};

class MetadataReader {
 public:
  explicit MetadataReader(const model::File& file)
      : in_(&file, limits_.max_header_bytes, limits_.max_array_depth) {}

  absl::StatusOr<ModelConfig> Read() {
    // Checked when the file was opened: magic, version, tensors.
    AWQD_RETURN_IF_ERROR(in_.Number<uint64_t>("magic and version").status());
    AWQD_RETURN_IF_ERROR(in_.Number<uint64_t>("count of tensors").status());
    AWQD_ASSIGN_OR_RETURN(const uint64_t keys, in_.Number<uint64_t>("count of metadata"));
    if (keys > kMostKeys) {
      return BadValue("count of metadata", keys, absl::StrCat("at most ", kMostKeys));
    }
    for (uint64_t i = 0; i < keys; ++i) {
      AWQD_ASSIGN_OR_RETURN(const std::string key,
                            in_.Text(static_cast<uint64_t>(limits_.max_key_bytes), "key"));
      const absl::Status status = ReadKey(key);
      if (!status.ok()) {
        return Prefixed(absl::StrCat("metadata ", Quoted(key, 64)), status);
      }
    }
    return Named();
  }

 private:
  absl::Status ReadKey(const std::string& key) {
    AWQD_ASSIGN_OR_RETURN(const uint32_t type, in_.Number<uint32_t>("type"));
    if (type == model::kGgufArray) return ReadArray(key);
    if (type >= std::size(kRead)) return in_.SkipValue(type);  // which says what is wrong
    AWQD_ASSIGN_OR_RETURN(all_[key], kRead[type](&in_));
    return absl::OkStatus();
  }

  absl::Status ReadArray(const std::string& key) {
    model::GgufInput ahead = in_;
    AWQD_RETURN_IF_ERROR(in_.SkipValue(model::kGgufArray));
    AWQD_ASSIGN_OR_RETURN(const uint32_t type, ahead.Number<uint32_t>("type of an array"));
    AWQD_ASSIGN_OR_RETURN(const uint64_t count, ahead.Number<uint64_t>("count of an array"));
    if (key == "tokenizer.ggml.tokens") tokens_ = count;
    const bool tokenizer = absl::StartsWith(key, "tokenizer.");
    if (tokenizer || type == model::kGgufArray || count > kMostValues) {
      left_out_.push_back(absl::StrCat("metadata ", Quoted(key, 64), " (", count, " values): ",
                                       tokenizer ? "no tokenizer is made of it" : "a long array"));
      return absl::OkStatus();
    }
    Json values = Json::array();
    for (uint64_t i = 0; i < count; ++i) {
      AWQD_ASSIGN_OR_RETURN(Json value, kRead[type](&ahead));
      values.push_back(std::move(value));
    }
    all_[key] = std::move(values);
    return absl::OkStatus();
  }

  // Numbers alone: a model whose layers differ has arrays, for which config.json has no common
  // name.
  void CopyNumber(const std::string& key, absl::string_view name, Json* to) const {
    const auto it = all_.find(key);
    if (it != all_.end() && it->is_number()) (*to)[std::string(name)] = *it;
  }

  ModelConfig Named() {
    ModelConfig out = {Json::object(), std::move(left_out_)};
    const std::string architecture = all_.value("general.architecture", "");
    if (!architecture.empty()) out.json["model_type"] = architecture;
    if (tokens_ > 0) out.json["vocab_size"] = tokens_;
    for (const auto& [gguf, config] : kModelNames) {
      CopyNumber(absl::StrCat(architecture, ".", gguf), config, &out.json);
    }
    for (const auto& [gguf, config] : kTokenNames) {
      CopyNumber(std::string(gguf), config, &out.json);
    }
    out.json["gguf"] = std::move(all_);
    return out;
  }

  const model::GgufLimits limits_;
  model::GgufInput in_;
  Json all_ = Json::object();
  uint64_t tokens_ = 0;
  std::vector<std::string> left_out_;
};

// --- Names of tensors ---

struct PathName {
  absl::string_view model, gguf;
};
// Behind "model.".
constexpr PathName kPaths[] = {
    {"embed_tokens", "token_embd"}, {"norm", "output_norm"}, {"lm_head", "output"}};
// Behind "model.layers.N.", and "blk.N.".
constexpr PathName kLayerPaths[] = {{"input_layernorm", "attn_norm"},
                                    {"post_attention_layernorm", "ffn_norm"},
                                    {"self_attn.q_proj", "attn_q"},
                                    {"self_attn.k_proj", "attn_k"},
                                    {"self_attn.v_proj", "attn_v"},
                                    {"self_attn.o_proj", "attn_output"},
                                    {"self_attn.q_norm", "attn_q_norm"},
                                    {"self_attn.k_norm", "attn_k_norm"},
                                    {"mlp.gate_proj", "ffn_gate"},
                                    {"mlp.up_proj", "ffn_up"},
                                    {"mlp.down_proj", "ffn_down"},
                                    {"mlp.gate", "ffn_gate_inp"},
                                    {"self_attn.sinks", "attn_sinks"},  // gpt-oss
                                    {"mlp.router", "ffn_gate_inp"},     // likewise
                                    {"block_sparse_moe.gate", "ffn_gate_inp"}};
// Behind "model.layers.N.mlp.experts.E." or "...block_sparse_moe.experts.E.".
constexpr PathName kExpertPaths[] = {{"gate_proj", "ffn_gate_exps"}, {"w1", "ffn_gate_exps"},
                                     {"up_proj", "ffn_up_exps"},     {"w3", "ffn_up_exps"},
                                     {"down_proj", "ffn_down_exps"}, {"w2", "ffn_down_exps"}};

template <size_t kCount>
std::string NameIn(const PathName (&table)[kCount], absl::string_view path) {
  for (const PathName& name : table) {
    if (name.model == path) return std::string(name.gguf);
  }
  return "";
}

// --- Metadata that are written ---

struct Architecture {
  absl::string_view model_type, gguf;
  bool rotate;  // RowOrder::heads of q and k
};
constexpr Architecture kArchitectures[] = {
    {"llama", "llama", true},     {"mistral", "llama", true}, {"mixtral", "llama", true},
    {"qwen2", "qwen2", false},    {"qwen3", "qwen3", false},  {"qwen3_moe", "qwen3moe", false},
    {"gpt_oss", "gpt-oss", false}};

constexpr uint32_t kGgufFloat32 = 6;
constexpr int64_t kMostHeadDim = 1 << 16;

template <typename T>
void AppendRaw(T value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// The number of a key, if it is one.
std::optional<double> NumberOf(const Json& object, absl::string_view key) {
  const auto it = object.find(std::string(key));
  if (it == object.end() || !it->is_number()) return std::nullopt;
  return it->get<double>();
}

std::string TextOf(const Json& object, absl::string_view key) {
  const auto it = object.find(std::string(key));
  return it != object.end() && it->is_string() ? it->get<std::string>() : "";
}

absl::StatusOr<double> Need(const Json& object, absl::string_view key, double least) {
  const std::optional<double> got = NumberOf(object, key);
  if (!got) return BadValue(absl::StrCat("config.json: ", key), "nothing", "a number");
  if (!(*got >= least) || *got > 1e15) {
    return BadValue(absl::StrCat("config.json: ", key), *got, absl::StrCat("at least ", least));
  }
  return *got;
}

// As transformers has them for rope_type "llama3", one for each pair of a head's numbers.
absl::StatusOr<std::vector<float>> LlamaFactors(const Json& scaling, double theta,
                                                int64_t head_dim) {
  double numbers[4];
  constexpr const char* kKeys[] = {"factor", "low_freq_factor", "high_freq_factor",
                                   "original_max_position_embeddings"};
  for (int i = 0; i < 4; ++i) {
    AWQD_ASSIGN_OR_RETURN(numbers[i], Need(scaling, kKeys[i], 0));
  }
  const auto [factor, low, high, context] = numbers;
  std::vector<float> out;
  for (int64_t i = 0; i < head_dim; i += 2) {
    const double wave = 2 * std::numbers::pi * std::pow(theta, static_cast<double>(i) / head_dim);
    const double smooth = (context / wave - low) / (high - low);
    out.push_back(static_cast<float>(wave < context / high ? 1
                                     : wave > context / low
                                         ? factor
                                         : 1 / ((1 - smooth) / factor + smooth)));
  }
  return out;
}

}  // namespace

absl::StatusOr<ModelConfig> ReadGgufConfig(const model::File& file) {
  absl::StatusOr<ModelConfig> out = MetadataReader(file).Read();
  if (!out.ok()) return Prefixed(file.shown_name(), out.status());
  return out;
}

int64_t RowOrder::Source(int64_t row, int64_t rows) const {
  if (heads == 0) return row * step + first;
  const int64_t of_head = rows / heads, in_head = row % of_head;
  return row - in_head + in_head % 2 * (of_head / 2) + in_head / 2;
}

absl::StatusOr<GgufNames> GgufNames::FromConfig(const Json& config) {
  GgufNames out;
  const std::string type = TextOf(config, "model_type");
  const auto* const found = absl::c_find_if(kArchitectures, [&](const Architecture& known) {
    return known.model_type == type || known.gguf == type;
  });
  out.known_ = found != std::end(kArchitectures);
  out.rotate_ = out.known_ && found->rotate;
  out.architecture_ = out.known_ ? std::string(found->gguf) : type.empty() ? "unknown" : type;
  if (!IsUtf8(out.architecture_) || out.architecture_.size() > 64) {
    return BadValue("config.json: model_type", Quoted(type), "at most 64 bytes of UTF-8");
  }
  out.AddText("general.architecture", out.architecture_);
  out.AddInteger("general.quantization_version", 2);
  out.AddText("tokenizer.ggml.model", "none");
  const absl::Status status = out.AddModel(config);
  if (!status.ok()) return status;
  return out;
}

void GgufNames::AddKey(absl::string_view key, uint32_t type) {
  AppendRaw<uint64_t>(key.size(), &metadata_);
  metadata_.append(key.data(), key.size());
  AppendRaw(type, &metadata_);
  ++keys_;
}

void GgufNames::AddInteger(absl::string_view key, int64_t value) {
  AddKey(key, model::kGgufUint32);
  AppendRaw(static_cast<uint32_t>(value), &metadata_);
}

void GgufNames::AddFloat(absl::string_view key, double value) {
  AddKey(key, kGgufFloat32);
  AppendRaw(static_cast<float>(value), &metadata_);
}

void GgufNames::AddText(absl::string_view key, absl::string_view value) {
  AddKey(key, model::kGgufString);
  AppendRaw<uint64_t>(value.size(), &metadata_);
  metadata_.append(value.data(), value.size());
}

absl::Status GgufNames::AddModel(const Json& config) {
  const auto key = [&](absl::string_view name) { return absl::StrCat(architecture_, ".", name); };
  const bool experts = NumberOf(config, "num_experts") || NumberOf(config, "num_local_experts");
  Json all = config;
  if (known_) {
    for (const char* needed : {"hidden_size", "num_hidden_layers", "num_attention_heads",
                               "intermediate_size", "max_position_embeddings", "vocab_size"}) {
      AWQD_RETURN_IF_ERROR(Need(config, needed, 1).status());
    }
    AWQD_RETURN_IF_ERROR(Need(config, "rms_norm_eps", 0).status());
    const double heads = *NumberOf(config, "num_attention_heads");
    heads_ = static_cast<int64_t>(heads);
    if (!NumberOf(all, "num_key_value_heads")) all["num_key_value_heads"] = heads_;
    if (!NumberOf(all, "head_dim")) {
      all["head_dim"] = static_cast<int64_t>(*NumberOf(config, "hidden_size") / heads);
    }
    AWQD_ASSIGN_OR_RETURN(const double kv_heads, Need(all, "num_key_value_heads", 1));
    kv_heads_ = static_cast<int64_t>(kv_heads);
    AWQD_ASSIGN_OR_RETURN(const double head_dim, Need(all, "head_dim", 2));
    if (head_dim > kMostHeadDim) {
      return BadValue("config.json: head_dim", head_dim, absl::StrCat("at most ", kMostHeadDim));
    }
    AddInteger(key("attention.value_length"), static_cast<int64_t>(head_dim));
    AddInteger(key("rope.dimension_count"), static_cast<int64_t>(head_dim));
    AWQD_RETURN_IF_ERROR(AddRotary(config, static_cast<int64_t>(head_dim)));
    const char* const ffn =
        NumberOf(config, "moe_intermediate_size") ? "moe_intermediate_size" : "intermediate_size";
    if (experts) {
      AddInteger(key("expert_feed_forward_length"), static_cast<int64_t>(*NumberOf(config, ffn)));
    }
    if (const auto count = NumberOf(config, "num_local_experts")) all["num_experts"] = *count;
    all.erase("rope_theta");  // AddRotary's
    if (config.value("use_sliding_window", Json(true)) == Json(false)) all.erase("sliding_window");
  }
  for (const auto& [gguf, name] : kModelNames) {
    const std::optional<double> number = NumberOf(all, name);
    if (!number) continue;
    if (absl::StrContains(gguf, "epsilon") || absl::StrContains(gguf, "freq")) {
      AddFloat(key(gguf), *number);
    } else if (*number >= 0 && *number <= UINT32_MAX) {
      AddInteger(key(gguf), static_cast<int64_t>(*number));
    }
  }
  return absl::OkStatus();
}

absl::Status GgufNames::AddRotary(const Json& config, int64_t head_dim) {
  const auto object = [&](const char* name) {
    const auto it = config.find(name);
    return it != config.end() && it->is_object() ? *it : Json::object();
  };
  // transformers 5 has both in one object.
  const Json parameters = object("rope_parameters");
  const Json scaling = parameters.empty() ? object("rope_scaling") : parameters;
  const double theta =
      NumberOf(config, "rope_theta").value_or(NumberOf(parameters, "rope_theta").value_or(10000));
  const auto key = [&](absl::string_view name) {
    return absl::StrCat(architecture_, ".rope.", name);
  };
  AddFloat(key("freq_base"), theta);
  std::string type = TextOf(scaling, "rope_type");
  if (type.empty()) type = TextOf(scaling, "type");
  if (type.empty() || type == "default") return absl::OkStatus();
  if (type == "llama3") {
    AWQD_ASSIGN_OR_RETURN(rope_factors_, LlamaFactors(scaling, theta, head_dim));
    return absl::OkStatus();
  }
  if (type != "linear" && type != "yarn") {
    return BadValue("config.json: rope_type", Quoted(type), "default, linear, llama3 or yarn");
  }
  AWQD_ASSIGN_OR_RETURN(const double factor, Need(scaling, "factor", 0));
  AddText(key("scaling.type"), type);
  AddFloat(key("scaling.factor"), factor);
  if (type == "linear") return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(const double context, Need(scaling, "original_max_position_embeddings", 1));
  AddInteger(key("scaling.original_context_length"), static_cast<int64_t>(context));
  return absl::OkStatus();
}

std::vector<GgufPlace> GgufNames::Find(absl::string_view path) const {
  if (!known_) return {{std::string(path)}};
  absl::ConsumePrefix(&path, "model.");
  if (std::string name = NameIn(kPaths, path); !name.empty()) return {{std::move(name)}};
  const std::vector<absl::string_view> parts = absl::StrSplit(path, absl::MaxSplits('.', 2));
  if (parts.size() != 3 || parts[0] != "layers") return {};
  const auto in_layer = [&](absl::string_view name) {
    return absl::StrCat("blk.", parts[1], ".", name);
  };
  std::string name = NameIn(kLayerPaths, parts[2]);
  if (!name.empty()) {
    // gpt-oss's norm is named as the others' is not.
    if (architecture_ == "gpt-oss" && name == "ffn_norm") name = "post_attention_norm";
    GgufPlace place = {in_layer(name)};
    if (rotate_ && name == "attn_q") place.rows.heads = heads_;
    if (rotate_ && name == "attn_k") place.rows.heads = kv_heads_;
    return {place};
  }
  const std::vector<absl::string_view> expert = absl::StrSplit(parts[2], '.');
  const std::optional<model::ExpertPath> parsed = model::ParseExpertPath(path);
  if (expert.size() != 4 || expert[1] != "experts" || !parsed) return {};
  const int64_t number = parsed->expert;
  if (expert[3] == "gate_up_proj") {
    return {{in_layer("ffn_gate_exps"), number, {.step = 2}},
            {in_layer("ffn_up_exps"), number, {.step = 2, .first = 1}}};
  }
  name = NameIn(kExpertPaths, expert[3]);
  if (name.empty()) return {};
  return {{in_layer(name), number}};
}

}  // namespace awqd::tools
