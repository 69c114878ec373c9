// Turns TOML values into the words of a command line, and back. Prints values as they were given,
// so that 64MiB stays 64MiB.
#include "server/config/config_file.h"

#include <toml++/toml.h>

#include <cctype>
#include <cstdlib>
#include <map>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
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

// --- Printing ---

struct Given {
  std::vector<std::string> values;
  std::string source;
};
using ByOption = std::map<const CLI::Option*, Given>;

bool IsSwitch(const CLI::Option& option) { return option.get_items_expected_max() == 0; }
bool IsList(const CLI::Option& option) {
  return option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
}

// "--no_reflection" gives false, as "--reflection=false" does.
std::string SwitchValue(absl::string_view flag, absl::string_view value) {
  const bool negated = absl::StartsWith(flag, "--no_");
  return negated == (value == "false") ? "true" : "false";
}

void AddValue(const CLI::Option& option, absl::string_view flag, const std::string& value,
              const std::string& source, ByOption* out) {
  Given& given = (*out)[&option];
  given.source = source;
  if (IsSwitch(option)) {
    given.values = {SwitchValue(flag, value)};
  } else if (IsList(option)) {
    for (const absl::string_view one : absl::StrSplit(value, ',', absl::SkipEmpty())) {
      given.values.emplace_back(one);
    }
  } else {
    given.values = {value};
  }
}

void AddArguments(const CLI::App& app, const std::vector<std::string>& args, ByOption* out) {
  for (size_t i = 0; i < args.size(); ++i) {
    const std::vector<std::string> parts = absl::StrSplit(args[i], absl::MaxSplits('=', 1));
    const CLI::Option* const option = app.get_option_no_throw(parts[0]);
    if (option == nullptr || !absl::StartsWith(parts[0], "--")) continue;
    const bool next = parts.size() == 1 && !IsSwitch(*option) && i + 1 < args.size();
    AddValue(*option, parts[0], next ? args[++i] : parts.size() > 1 ? parts[1] : "", "flag", out);
  }
}

void AddFile(const CLI::App& app, const std::vector<ConfigValue>& file, const std::string& path,
             ByOption* out) {
  ByOption found;
  for (const ConfigValue& value : file) {
    const std::string flag = absl::StrCat("--", value.flag);
    const CLI::Option* const option = app.get_option_no_throw(flag);
    for (const std::string& word : value.values) {
      AddValue(*option, flag, word, absl::StrCat(path, ":", value.line), &found);
    }
  }
  out->merge(found);  // values of flags take precedence
}

void AddEnvironment(const CLI::Option& option, ByOption* out) {
  const char* const value = std::getenv(option.get_envname().c_str());
  if (value == nullptr || *value == '\0' || out->contains(&option)) return;
  AddValue(option, "", value, absl::StrCat("environment ", option.get_envname()), out);
}

// CLI11 writes a list as [a,b].
Given Default(const CLI::Option& option) {
  const std::string preset = option.get_default_str();
  absl::string_view text = preset;
  Given out = {{}, "default"};
  if (!IsList(option)) {
    if (!text.empty()) out.values.emplace_back(text);
    return out;
  }
  text = absl::StripSuffix(absl::StripPrefix(text, "["), "]");
  for (const absl::string_view one : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    out.values.emplace_back(one);
  }
  return out;
}

// Spells a value in TOML. Numbers with a leading zero (permissions) become strings.
std::string TomlValue(const std::string& text) {
  double number = 0;
  const absl::string_view part = absl::StripPrefix(text, "-");
  const bool digits = absl::c_all_of(part, [](char c) { return std::isdigit(c) || c == '.'; });
  const bool plain = digits && absl::SimpleAtod(part, &number) && std::isdigit(part.front()) &&
                     std::isdigit(part.back()) &&
                     (part[0] != '0' || part.size() == 1 || part[1] == '.');
  if (plain || text == "true" || text == "false") return text;
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out.push_back('\\');
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      absl::StrAppendFormat(&out, "\\u%04x", c);
    } else {
      out.push_back(c);
    }
  }
  return out + "\"";
}

std::string Line(const CLI::Option& option, const Given& given) {
  std::vector<std::string> values;
  for (const std::string& value : given.values) values.push_back(TomlValue(value));
  const std::string value = IsList(option)   ? absl::StrCat("[", absl::StrJoin(values, ", "), "]")
                            : values.empty() ? "\"\""
                                             : values.back();
  const std::string text =
      absl::StrCat(values.empty() ? "# " : "", option.get_lnames().front(), " = ", value);
  return absl::StrFormat("%-46s  # %s\n", text, given.source);
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

std::string PrintedConfig(const CLI::App& app, const std::vector<std::string>& args,
                          const std::vector<ConfigValue>& file, const std::string& path) {
  ByOption given;
  AddArguments(app, args, &given);
  AddFile(app, file, path, &given);
  std::string out, group;
  for (const CLI::Option* option : app.get_options([](const CLI::Option*) { return true; })) {
    if (option->get_envname().empty()) continue;  // help, version
    AddEnvironment(*option, &given);
    if (option->get_group() != group) {
      group = option->get_group();
      absl::StrAppend(&out, out.empty() ? "" : "\n", "# ", group, "\n");
    }
    const auto it = given.find(option);
    absl::StrAppend(&out, Line(*option, it == given.end() ? Default(*option) : it->second));
  }
  return out;
}

}  // namespace awqd
