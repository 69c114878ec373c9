// LinearRules: which linears of a checkpoint are quantised, and with which settings.
#pragma once

#include <re2/re2.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/formats/format.h"

namespace awqd::model {

// The patterns of a QuantConfig, ready to be matched. Regular expressions are RE2's, which take
// time in proportion to the path, and match from its beginning as Python's re.match does.
// Move-only.
class LinearRules {
 public:
  // INVALID_ARGUMENT for a regular expression that RE2 does not take (a look-ahead, say), is longer
  // than 1024 bytes, or is one too many.
  static absl::StatusOr<LinearRules> Make(const QuantConfig& config);

  // How the linear at `path` is decoded: a rule without its targets. Null when it is not quantised.
  const LinearRule* RuleOf(absl::string_view path) const;

 private:
  class Pattern {
   public:
    explicit Pattern(const ModulePattern& pattern);
    // Empty, or why the expression cannot be used.
    std::string error() const { return regex_ == nullptr || regex_->ok() ? "" : regex_->error(); }
    bool Matches(absl::string_view path) const;

   private:
    ModulePattern pattern_;
    std::unique_ptr<const RE2> regex_;
  };
  // Paths as they are, of which there may be one for each linear, and the others.
  struct Patterns {
    std::set<std::string, std::less<>> exact;
    std::vector<Pattern> others;
  };
  struct Rule {
    Patterns targets;
    std::unique_ptr<const LinearRule> rule;  // stays where it is when the rules move
  };
  static absl::StatusOr<Patterns> Compile(const std::vector<ModulePattern>& patterns);
  static bool AnyMatches(const Patterns& patterns, absl::string_view path);

  std::vector<Rule> rules_;
  Patterns left_out_;
};

}  // namespace awqd::model
