// LinearRules: which settings a checkpoint has for which linear, by its path.
#pragma once

#include <re2/set.h>

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/formats/format.h"

namespace awqd::model {

// The patterns of a QuantConfig, ready to be matched. Regular expressions are RE2's, which take
// time in proportion to the path, and match from its beginning as Python's re.match does. Many are
// compiled into one automaton, and all automata together take at most 150 MiB. An expression
// without operators takes one lookup, so thousands of them cost no time. Move-only.
class LinearRules {
 public:
  // An expression that RE2 does not take (a look-ahead, say) or that is longer than 1024 bytes
  // matches nothing; note() tells of it. INVALID_ARGUMENT for more expressions, or larger ones,
  // than all lists together may have. UNAVAILABLE once `cancelled`.
  static absl::StatusOr<LinearRules> Make(const QuantConfig& config,
                                          const std::atomic<bool>* cancelled = nullptr);

  // Visits the rules whose targets match `path`, in their order, until `visit` returns false. The
  // rule is null, and the first, where the settings leave the linear out. A rule has no targets.
  // INVALID_ARGUMENT where the automata need too much memory for the path, UNAVAILABLE once
  // `cancelled`.
  absl::Status VisitRules(absl::string_view path,
                          absl::FunctionRef<bool(const LinearRule* rule)> visit,
                          const std::atomic<bool>* cancelled = nullptr) const;

  // The first rule that VisitRules visits; null where there is none, or the linear is left out.
  absl::StatusOr<const LinearRule*> RuleOf(absl::string_view path,
                                           const std::atomic<bool>* cancelled = nullptr) const;

  // The rules of the additions that are for `path`, in their order. Errors as those of VisitRules.
  // Where an expression of theirs cannot be read, every path has a rule that tells of it.
  absl::StatusOr<std::vector<const LinearRule*>> FindAdditions(
      absl::string_view path, const std::atomic<bool>* cancelled = nullptr) const;

  // Every rule, in order, without those of additions.
  const std::vector<std::unique_ptr<const LinearRule>>& all() const { return rules_; }

  // For people: the expressions that cannot be read. Empty where there are none.
  const std::string& note() const { return note_; }

 private:
  // Patterns are ranked: 0 leaves a linear out, 1 + i is a target of rule i. The least counts.
  struct Expressions {
    std::unique_ptr<const RE2::Set> set;
    std::vector<int> ranks;  // of each expression, ascending
  };
  using Ranks = std::map<std::string, std::vector<int>, std::less<>>;  // by text
  class Compiler;

  absl::Status AddPatterns(const std::vector<ModulePattern>& patterns, int rank,
                           Compiler* compiler);
  absl::Status AddExpression(const std::string& text, int rank, Compiler* compiler);
  // The ranks of all matches but those of the automata, ascending.
  absl::StatusOr<std::vector<int>> LookUp(absl::string_view path,
                                          const std::atomic<bool>* cancelled) const;

  std::vector<std::unique_ptr<const LinearRule>> rules_;  // stay where they are when this moves
  std::vector<int> every_;                                // the ranks of "every module"
  Ranks paths_;                                           // there may be one for each linear
  Ranks contained_;
  std::set<size_t> contained_components_;  // the numbers of components of those
  Ranks prefixes_;                         // expressions without operators that have no end
  std::set<size_t> prefix_bytes_;          // their lengths
  std::vector<Expressions> expressions_;   // ranks ascend
  int unread_ = 0;
  std::string note_;
  // Two rules of each addition, what it leaves out and what it is for; null without additions.
  std::unique_ptr<const LinearRules> additions_;
};

}  // namespace awqd::model
