// Reading of quantisation settings. Writers disagree on names; every name in use is accepted once.
#include "server/model/quant_config.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/model/file.h"
#include "server/model/json.h"

namespace awqd::model {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 32;
constexpr int64_t kMaxModules = 100'000;
constexpr size_t kMaxTextBytes = 64;  // of names of methods and versions, which errors repeat

absl::Status Bad(absl::string_view key, const Json& got, absl::string_view expected) {
  const std::string text = got.dump(-1, ' ', false, Json::error_handler_t::replace);
  return absl::InvalidArgumentError(
      absl::StrCat(key, ": got ", Quoted(text, 64), ", expected ", expected));
}

// The value under the first of two names; an error when both are there and differ. Null counts as
// absent.
absl::StatusOr<const Json*> Either(const Json& object, absl::string_view name,
                                   absl::string_view other) {
  const auto find = [&](absl::string_view key) -> const Json* {
    const auto it = object.find(std::string(key));
    return it == object.end() || it->is_null() ? nullptr : &*it;
  };
  const Json* a = find(name);
  const Json* b = find(other);
  if (a != nullptr && b != nullptr && *a != *b) {
    return Bad(name, *a, absl::StrCat("the same as ", other, ", or only one of the two"));
  }
  return a != nullptr ? a : b;
}

absl::StatusOr<std::string> Text(const Json& object, absl::string_view name,
                                 absl::string_view fallback) {
  const auto it = object.find(std::string(name));
  if (it == object.end() || it->is_null()) return std::string(fallback);
  if (!it->is_string()) return Bad(name, *it, "a string");
  if (it->get_ref<const std::string&>().size() > kMaxTextBytes) {
    return Bad(name, *it, absl::StrCat("at most ", kMaxTextBytes, " bytes"));
  }
  return absl::AsciiStrToLower(it->get_ref<const std::string&>());
}

// A whole number within [min, max], or nothing when absent.
absl::StatusOr<std::optional<int64_t>> Number(const Json& object, absl::string_view name,
                                              absl::string_view other, int64_t min, int64_t max) {
  AWQD_ASSIGN_OR_RETURN(const Json* value, Either(object, name, other));
  if (value == nullptr) return std::optional<int64_t>();
  const std::string expected = absl::StrCat("a whole number from ", min, " to ", max);
  // Unsigned first: a number past 2^63 must not wrap into range.
  if (value->is_number_unsigned() &&
      value->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return Bad(name, *value, expected);
  }
  if (!value->is_number_integer()) return Bad(name, *value, expected);
  const int64_t number = value->get<int64_t>();
  if (number < min || number > max) return Bad(name, *value, expected);
  return std::optional<int64_t>(number);
}

absl::Status ReadModules(const Json& object, QuantConfig* out) {
  constexpr absl::string_view kKey = "modules_to_not_convert";
  const auto it = object.find(std::string(kKey));
  if (it == object.end() || it->is_null()) return absl::OkStatus();
  if (!it->is_array()) return Bad(kKey, *it, "null or a list of strings");
  if (static_cast<int64_t>(it->size()) > kMaxModules) {
    return absl::InvalidArgumentError(
        absl::StrCat(kKey, ": got ", it->size(), " entries, expected at most ", kMaxModules));
  }
  for (const Json& module : *it) {
    // The match is by substring: an empty string would leave out every module.
    if (!module.is_string() || module.get_ref<const std::string&>().empty()) {
      return Bad(kKey, module, "a list of strings that are not empty");
    }
    out->modules_to_not_convert.push_back(module.get<std::string>());
  }
  return absl::OkStatus();
}

// GPTQModel writes the version as "format", or "checkpoint_format".
absl::StatusOr<std::string> Version(const Json& object) {
  for (absl::string_view key : {"version", "format", "checkpoint_format"}) {
    AWQD_ASSIGN_OR_RETURN(std::string version, Text(object, key, ""));
    if (!version.empty()) return version;
  }
  return std::string();
}

absl::Status ReadNumbers(const Json& object, QuantConfig* out) {
  AWQD_ASSIGN_OR_RETURN(const auto bits, Number(object, "bits", "w_bit", 1, 32));
  AWQD_ASSIGN_OR_RETURN(const auto group, Number(object, "group_size", "q_group_size", -1,
                                                 std::numeric_limits<int64_t>::max()));
  if (!bits) return absl::InvalidArgumentError("bits (or w_bit): got nothing, expected a number");
  if (!group || *group == 0) {
    return absl::InvalidArgumentError(absl::StrCat("group_size (or q_group_size): got ",
                                                   group ? "0" : "nothing",
                                                   ", expected -1 (all of K) or at least 1"));
  }
  out->bits = static_cast<int>(*bits);
  out->group_size = *group;
  return absl::OkStatus();
}

absl::StatusOr<QuantConfig> FromObject(const Json& object, absl::string_view default_method) {
  QuantConfig out;
  AWQD_ASSIGN_OR_RETURN(out.quant_method, Text(object, "quant_method", default_method));
  if (out.quant_method.empty()) {
    return absl::InvalidArgumentError("quant_method: got nothing, expected for example \"awq\"");
  }
  // Other methods have other keys; FindFormat says that they are not read, which helps more than
  // an error about a key that they never have.
  if (out.quant_method != "awq") return out;
  AWQD_ASSIGN_OR_RETURN(out.version, Version(object));
  AWQD_RETURN_IF_ERROR(ReadNumbers(object, &out));
  const auto zero = object.find("zero_point");
  if (zero != object.end() && !zero->is_null()) {
    if (!zero->is_boolean()) return Bad("zero_point", *zero, "true or false");
    out.zero_point = zero->get<bool>();
  }
  AWQD_RETURN_IF_ERROR(ReadModules(object, &out));
  return out;
}

}  // namespace

absl::StatusOr<std::optional<QuantConfig>> ParseConfigJson(absl::string_view text) {
  AWQD_ASSIGN_OR_RETURN(const Json config, ParseJsonObject(text, kMaxDepth));
  const auto it = config.find("quantization_config");
  if (it == config.end() || it->is_null()) return std::optional<QuantConfig>();
  if (!it->is_object()) return Bad("quantization_config", *it, "an object");
  absl::StatusOr<QuantConfig> out = FromObject(*it, "");
  if (!out.ok()) {
    return absl::Status(out.status().code(),
                        absl::StrCat("quantization_config.", out.status().message()));
  }
  return std::optional<QuantConfig>(*std::move(out));
}

absl::StatusOr<QuantConfig> ParseQuantConfigJson(absl::string_view text,
                                                 absl::string_view default_method) {
  AWQD_ASSIGN_OR_RETURN(const Json config, ParseJsonObject(text, kMaxDepth));
  return FromObject(config, default_method);
}

bool IsNotConverted(const QuantConfig& config, absl::string_view path) {
  for (const std::string& module : config.modules_to_not_convert) {
    if (absl::StrContains(path, module)) return true;
  }
  return false;
}

}  // namespace awqd::model
