// LinearRules: which linears of a checkpoint are quantised, and with which settings.
#pragma once

#include <re2/set.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/formats/format.h"

namespace awqd::model {

// The patterns of a QuantConfig, ready to be matched. Regular expressions are RE2's, which take
// time in proportion to the path, and match from its beginning as Python's re.match does. Many are
// compiled into one automaton, and all automata together take at most 150 MiB. Move-only.
class LinearRules {
 public:
  // INVALID_ARGUMENT for a regular expression that RE2 does not take (a look-ahead, say) or is
  // longer than 1024 bytes, and for more of them, or larger ones, than all lists together may have.
  // UNAVAILABLE once `cancelled`.
  static absl::StatusOr<LinearRules> Make(const QuantConfig& config,
                                          const std::atomic<bool>* cancelled = nullptr);

  // How the linear at `path` is decoded: a rule without its targets. Null when it is not quantised.
  // UNAVAILABLE once `cancelled`.
  absl::StatusOr<const LinearRule*> RuleOf(absl::string_view path,
                                           const std::atomic<bool>* cancelled = nullptr) const;

 private:
  // Patterns are ranked: 0 leaves a linear out, 1 + i is a target of rule i. The least counts.
  struct Expressions {
    std::unique_ptr<const RE2::Set> set;
    std::vector<int> ranks;  // of each expression, ascending
  };
  class Compiler;

  absl::Status AddPatterns(const std::vector<ModulePattern>& patterns, int rank,
                           Compiler* compiler);

  std::vector<std::unique_ptr<const LinearRule>> rules_;  // stay where they are when this moves
  int every_ = 0;                                         // the rank of "every module"
  std::map<std::string, int, std::less<>> exact_;         // there may be one for each linear
  std::vector<std::pair<std::string, int>> contained_;    // ranks ascend
  std::vector<Expressions> expressions_;                  // likewise
};

}  // namespace awqd::model
