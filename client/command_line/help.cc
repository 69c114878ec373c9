// Two columns, wrapped.
#include "client/command_line/help.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace awqd::command_line {
namespace {

constexpr size_t kTextColumn = 34;
// CLI11 moves the flags of an option group two columns to the right.
constexpr size_t kColumns = kHelpColumns - 2;

std::string Sentence(absl::string_view text) {
  text = text.substr(0, text.find('\n'));
  const size_t end = text.find(". ");
  return std::string(end == text.npos ? text : text.substr(0, end + 1));
}

// `name` and `text` side by side, `text` below where `name` is long.
std::string Entry(const std::string& name, const std::string& text) {
  const std::string margin(kTextColumn, ' ');
  std::string out = absl::StrCat("  ", name);
  if (text.empty()) return out + "\n";
  if (out.size() + 2 > kTextColumn) {
    out = absl::StrCat(Wrapped(out, kColumns, 4), "\n", margin);
  } else {
    out.resize(kTextColumn, ' ');
  }
  const std::vector<std::string> lines =
      absl::StrSplit(Wrapped(text, kColumns - kTextColumn, 0), '\n');
  return absl::StrCat(out, absl::StrJoin(lines, absl::StrCat("\n", margin)), "\n");
}

// CLI11 puts bounds behind the name of the type: "INT:INT in [1 - 9]".
std::pair<std::string, std::string> TypeAndBounds(const CLI::Option& option) {
  const std::string both = option.get_type_name();
  size_t colon = 0;
  for (int open = 0; colon < both.size(); ++colon) {
    if (both[colon] == '[') ++open;
    if (both[colon] == ']') --open;
    if (both[colon] == ':' && open == 0) break;  // not that of "M[:SHARE]"
  }
  return {both.substr(0, colon), colon < both.size() ? both.substr(colon + 1) : ""};
}

// Adds the names of `others`, by name: CLI11 keeps them in the order of their addresses, which
// differs from run to run.
void AddNames(const std::set<CLI::Option*>& others, absl::string_view relation,
              std::vector<std::string>* facts) {
  std::set<std::string> names;
  for (const CLI::Option* other : others) names.insert(other->get_name());
  for (const std::string& name : names) facts->push_back(absl::StrCat(relation, " ", name));
}

// What the flag is without, what it takes, and which flags it goes with or against.
std::string Facts(const CLI::Option& option, const std::string& bounds) {
  std::vector<std::string> facts;
  const std::string preset = option.get_default_str();
  if (!preset.empty() && preset != "[]") facts.push_back(absl::StrCat("default ", preset));
  if (!bounds.empty()) facts.push_back(bounds);
  if (option.get_required()) facts.push_back("required");
  AddNames(option.get_needs(), "with", &facts);
  AddNames(option.get_excludes(), "not with", &facts);
  return facts.empty() ? "" : absl::StrCat(" (", absl::StrJoin(facts, "; "), ")");
}

}  // namespace

std::optional<HelpDetail> HelpAsked(const std::vector<std::string>& args) {
  std::optional<HelpDetail> out;
  for (const std::string& arg : args) {
    if (arg == "--") break;
    if (arg == "--help=all") return HelpDetail::kAll;
    if (arg == "--help" || arg == "-h") out = HelpDetail::kShort;
  }
  return out;
}

std::string Wrapped(absl::string_view text, size_t columns, size_t hang) {
  std::vector<std::string> out;
  for (const absl::string_view whole : absl::StrSplit(text, '\n')) {
    absl::string_view line = whole;
    const size_t margin = std::min(line.find_first_not_of(' '), line.size());
    std::string start(margin, ' ');
    line.remove_prefix(margin);
    while (start.size() + line.size() > columns) {
      const size_t room = columns - std::min(columns, start.size());
      size_t end = line.rfind(' ', room);
      if (end == line.npos || end == 0) end = line.find(' ');
      if (end == line.npos) break;
      out.push_back(absl::StrCat(start, line.substr(0, end)));
      line.remove_prefix(end + 1);
      start.assign(margin + hang, ' ');
    }
    out.push_back(absl::StrCat(start, line));
  }
  return absl::StrJoin(out, "\n");
}

HelpFormatter::HelpFormatter(HelpDetail detail) : detail_(detail) { column_width(kTextColumn); }

std::string HelpFormatter::make_option(const CLI::Option* option, bool is_positional) const {
  const auto [type, bounds] = TypeAndBounds(*option);
  // CLI11 puts behind a name what it stands for: "--no_x{false}".
  std::string name =
      absl::StrReplaceAll(make_option_name(option, is_positional), {{"{false}", ""}});
  if (!is_positional && !type.empty()) absl::StrAppend(&name, " ", type);
  const std::string& text = option->get_description();
  if (detail_ == HelpDetail::kShort) return Entry(name, Sentence(text));
  return Entry(name, absl::StrCat(text, Facts(*option, bounds)));
}

std::string HelpFormatter::make_subcommand(const CLI::App* command) const {
  return Entry(command->get_display_name(), Sentence(command->get_description()));
}

std::string HelpFormatter::make_description(const CLI::App* app) const {
  std::string text = app->get_description();
  if (app->get_require_option_min() == 1) {
    absl::StrAppend(&text, text.empty() ? "" : "\n",
                    app->get_require_option_max() == 1 ? "Exactly" : "At least", " one of these:");
  }
  return text.empty() ? "" : absl::StrCat(Wrapped(text, kHelpColumns, 2), "\n\n");
}

std::string HelpFormatter::make_footer(const CLI::App* app) const {
  const std::string text = app->get_footer();
  return text.empty() ? "" : absl::StrCat(Wrapped(text, kHelpColumns, 2), "\n");
}

}  // namespace awqd::command_line
