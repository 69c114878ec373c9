// What a checkpoint's JSON files say about quantisation, in QuantConfig's words.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/formats/format.h"

namespace awqd::model {

// config.json: the object under "quantization_config"; nothing when the key is absent or null.
// INVALID_ARGUMENT naming the key, what was got and what was expected.
absl::StatusOr<std::optional<QuantConfig>> ParseConfigJson(absl::string_view text);

// quant_config.json or quantize_config.json, whose top level has the keys. `default_method` is
// assumed when the file names no quant_method.
absl::StatusOr<QuantConfig> ParseQuantConfigJson(absl::string_view text,
                                                 absl::string_view default_method);

// True when `path` is one of, or contains one of, modules_to_not_convert.
bool IsNotConverted(const QuantConfig& config, absl::string_view path);

}  // namespace awqd::model
