// Metadata of a GGUF file, key by key.
#include "client/tools/gguf_config.h"

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/gguf.h"
#include "kernels/checkpoint/gguf_input.h"

namespace awqd::tools {
namespace {

using Json = nlohmann::ordered_json;
using Value = absl::StatusOr<Json>;

constexpr uint64_t kMostValues = 256;   // of an array that is kept
constexpr uint64_t kMostKeys = 10'000;  // each is looked for among those before it

// What a key is called in config.json; those of the model stand behind "<architecture>.".
struct Name {
  absl::string_view gguf, config;
};
constexpr Name kModelNames[] = {{"vocab_size", "vocab_size"},
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
constexpr Name kTokenNames[] = {{"tokenizer.ggml.bos_token_id", "bos_token_id"},
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

class Reader {
 public:
  explicit Reader(const model::File& file)
      : in_(&file, limits_.max_header_bytes, limits_.max_array_depth) {}

  absl::StatusOr<GgufConfig> Read() {
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

  GgufConfig Named() {
    GgufConfig out = {Json::object(), std::move(left_out_)};
    const std::string architecture = all_.value("general.architecture", "");
    if (!architecture.empty()) out.config["model_type"] = architecture;
    if (tokens_ > 0) out.config["vocab_size"] = tokens_;
    for (const auto& [gguf, config] : kModelNames) {
      CopyNumber(absl::StrCat(architecture, ".", gguf), config, &out.config);
    }
    for (const auto& [gguf, config] : kTokenNames) {
      CopyNumber(std::string(gguf), config, &out.config);
    }
    out.config["gguf"] = std::move(all_);
    return out;
  }

  const model::GgufLimits limits_;
  model::GgufInput in_;
  Json all_ = Json::object();
  uint64_t tokens_ = 0;
  std::vector<std::string> left_out_;
};

}  // namespace

absl::StatusOr<GgufConfig> ReadGgufConfig(const model::File& file) {
  absl::StatusOr<GgufConfig> out = Reader(file).Read();
  if (!out.ok()) return Prefixed(file.shown_name(), out.status());
  return out;
}

}  // namespace awqd::tools
