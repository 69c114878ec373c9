// Matching of module paths.
#include "checkpoint/linear_rules.h"

#include <utility>

#include "absl/strings/match.h"
#include "checkpoint/file.h"
#include "kernels/base/status.h"

namespace awqd::model {
namespace {

constexpr size_t kMaxRegexBytes = 1024;
constexpr size_t kMaxRegexes = 10'000;
constexpr int64_t kRegexMemory = 1 << 20;  // of one, compiled

}  // namespace

LinearRules::Pattern::Pattern(const ModulePattern& pattern) : pattern_(pattern) {
  if (pattern.kind != ModulePattern::Kind::kRegex) return;
  RE2::Options options(RE2::Quiet);
  options.set_max_mem(kRegexMemory);
  regex_ = std::make_unique<RE2>(pattern.text, options);
}

bool LinearRules::Pattern::Matches(absl::string_view path) const {
  switch (pattern_.kind) {
    case ModulePattern::Kind::kEvery:
      return true;
    case ModulePattern::Kind::kExact:  // looked up elsewhere
      return path == pattern_.text;
    case ModulePattern::Kind::kContains:
      return absl::StrContains(path, pattern_.text);
    case ModulePattern::Kind::kRegex:
      return regex_->Match({path.data(), path.size()}, 0, path.size(), RE2::ANCHOR_START, nullptr,
                           0);
  }
  return false;
}

absl::StatusOr<LinearRules::Patterns> LinearRules::Compile(
    const std::vector<ModulePattern>& patterns) {
  Patterns out;
  size_t regexes = 0;
  for (const ModulePattern& pattern : patterns) {
    if (pattern.kind == ModulePattern::Kind::kExact) {
      out.exact.insert(pattern.text);
      continue;
    }
    const bool regex = pattern.kind == ModulePattern::Kind::kRegex;
    regexes += regex ? 1 : 0;
    if (regex && pattern.text.size() > kMaxRegexBytes) {
      return Invalid("pattern of modules: got ", pattern.text.size(),
                     " bytes of a regular expression, expected at most ", kMaxRegexBytes);
    }
    if (regexes > kMaxRegexes) {
      return Invalid("patterns of modules: got more than ", kMaxRegexes, " regular expressions");
    }
    out.others.emplace_back(pattern);
    if (const std::string error = out.others.back().error(); !error.empty()) {
      return Invalid("pattern of modules: got ", Quoted(pattern.text, 64),
                     ", expected a regular expression of RE2 (", Quoted(error, 64), ")");
    }
  }
  return out;
}

bool LinearRules::AnyMatches(const Patterns& patterns, absl::string_view path) {
  if (patterns.exact.contains(path)) return true;
  for (const Pattern& pattern : patterns.others) {
    if (pattern.Matches(path)) return true;
  }
  return false;
}

absl::StatusOr<LinearRules> LinearRules::Make(const QuantConfig& config) {
  LinearRules out;
  AWQD_ASSIGN_OR_RETURN(out.left_out_, Compile(config.left_out));
  for (const LinearRule& rule : config.rules) {
    AWQD_ASSIGN_OR_RETURN(Patterns targets, Compile(rule.targets));
    out.rules_.push_back({std::move(targets), std::make_unique<const LinearRule>(
                                                  LinearRule{{}, rule.settings, rule.format})});
  }
  return out;
}

const LinearRule* LinearRules::RuleOf(absl::string_view path) const {
  if (AnyMatches(left_out_, path)) return nullptr;
  for (const Rule& rule : rules_) {
    if (AnyMatches(rule.targets, path)) return rule.rule.get();
  }
  return nullptr;
}

}  // namespace awqd::model
