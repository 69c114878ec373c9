// Settings of quantisation: where a model's folder has them, and their JSON as a Setting, which
// formats read.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/file.h"
#include "kernels/formats/format.h"

namespace awqd::model {

constexpr absl::string_view kConfigFile = "config.json";

// A checkpoint's settings of quantisation, and the file and key that they stand under.
struct QuantSettings {
  Setting settings;
  std::string place;  // "my-model/config.json: quantization_config"
};

// The places in config.json that may have settings, in the order in which they are looked for:
// "quantization", "quantization_config", ..., "text_config.quantization", ...
std::vector<std::string> PlacesOfSettings();

// Parses config.json. The settings are the first object at one of PlacesOfSettings, and `place` is
// that place: MLX's "quantization", "quantization_config", or "compression_config" of 2024, at the
// top or in the settings of a part of the model. Nothing when all are absent or null.
// INVALID_ARGUMENT for a text that is no JSON, no object, or too large.
absl::StatusOr<std::optional<QuantSettings>> ParseConfigJson(absl::string_view text);

// Parses an object of JSON, in which no names of settings are known.
absl::StatusOr<Setting> ParseSettingsJson(absl::string_view text);

// Parses quant_config.json, quantize_config.json or hf_quant_config.json, whose top level has the
// keys. `default_method` is assumed when the file names no quant_method.
absl::StatusOr<Setting> ParseQuantConfigJson(absl::string_view text,
                                             absl::string_view default_method);

// Reads the settings in the model's config.json; nothing when it has none. NOT_FOUND when the
// directory or its config.json is missing, INVALID_ARGUMENT naming file and key otherwise.
absl::StatusOr<std::optional<QuantSettings>> ReadConfigSettings(const FileSource& root,
                                                                absl::string_view model);

// The out features of the projections of a model's attention.
struct AttentionRows {
  int64_t q = 0, k = 0, v = 0;
  int64_t key_value_heads = 0;
};
// Every kind of attention that the model's config.json tells of: num_attention_heads,
// num_key_value_heads, head_dim and v_head_dim, the same behind "swa_", and in the settings of
// parts of the model. Empty where it cannot be read.
std::vector<AttentionRows> ReadAttentionRows(const FileSource& root, absl::string_view model);

// The number of that name in the model's config.json and in the settings of all its parts; 0 where
// one of them has none, or two differ.
int64_t ReadSize(const FileSource& root, absl::string_view model, const std::string& name);

// The file beside config.json that ModelOpt writes. It wins over config.json where that still has
// the settings of the model that ModelOpt was given.
constexpr absl::string_view kModelOptFile = "hf_quant_config.json";

// Reads the first of the files beside config.json that is there: quant_config.json,
// quantize_config.json, quanto_qmap.json, hf_quant_config.json; or, with `modelopt_alone`, only
// the last. Nothing when none is.
absl::StatusOr<std::optional<QuantSettings>> ReadSideSettings(const FileSource& root,
                                                              absl::string_view model,
                                                              bool modelopt_alone = false);

}  // namespace awqd::model
