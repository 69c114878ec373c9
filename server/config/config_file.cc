// Turns TOML values into the words of a command line.
#include "server/config/config_file.h"

#include <toml++/toml.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/status.h"

namespace awqd {
namespace {

// Returns nullopt for tables, dates and nested lists.
std::optional<std::string> ToWord(const toml::node& node) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_integer()) return absl::StrCat(number->get());
  if (const auto* number = node.as_floating_point()) return absl::StrFormat("%.17g", number->get());
  if (const auto* truth = node.as_boolean()) return truth->get() ? "true" : "false";
  return std::nullopt;
}

absl::StatusOr<ConfigValue> ParseValue(absl::string_view key, const toml::node& node,
                                       absl::string_view path) {
  ConfigValue out = {std::string(key), {}, static_cast<int>(node.source().begin.line)};
  const auto add = [&out](const toml::node& one) {
    std::optional<std::string> word = ToWord(one);
    if (word) out.values.push_back(*std::move(word));
    return word.has_value();
  };
  bool good = true;
  if (const toml::array* list = node.as_array()) {
    for (const toml::node& one : *list) good &= add(one);
  } else {
    good = add(node);
  }
  if (good) return out;
  return absl::InvalidArgumentError(absl::StrCat(
      path, ":", out.line, ": ", key, ": got ", node.is_table() ? "a table" : "a value",
      ", expected a string in quotes, a number, true or false, or a list of these"));
}

}  // namespace

absl::StatusOr<std::vector<ConfigValue>> ParseConfigText(absl::string_view text,
                                                         absl::string_view path) {
  try {
    const toml::table table = toml::parse(std::string_view(text.data(), text.size()));
    std::vector<ConfigValue> out;
    for (const auto& [key, node] : table) {
      AWQD_ASSIGN_OR_RETURN(ConfigValue value, ParseValue(std::string(key.str()), node, path));
      out.push_back(std::move(value));
    }
    return out;
  } catch (const toml::parse_error& error) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ":", error.source().begin.line, ": ", std::string(error.description()),
                     " (expected key = value, with strings in quotes)"));
  }
}

}  // namespace awqd
