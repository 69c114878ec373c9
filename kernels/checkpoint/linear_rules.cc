// Matching of module paths.
#include "kernels/checkpoint/linear_rules.h"

#include <re2/re2.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/file.h"

namespace awqd::model {
namespace {

constexpr int kNone = std::numeric_limits<int>::max();

// The bounds of the expressions of all lists together.
constexpr size_t kMaxRegexes = 10'000;
constexpr size_t kMaxRegexBytes = 1024;  // of one
constexpr int64_t kMaxInstructions = 384 << 10;

constexpr int64_t kRegexMemory = 1 << 20;  // of one while it is checked
// The time that a set takes for one path grows with its instructions, and nobody can interrupt it.
constexpr int64_t kSetInstructions = 16 << 10;
// Room for the instructions and for the 20 states without which RE2 does not match, and more than
// are ever needed at a time where paths and expressions are like those of real models.
constexpr int64_t kSetMemory = 3 << 20;

RE2::Options Options(int64_t memory) {
  RE2::Options out(RE2::Quiet);
  out.set_max_mem(memory);
  return out;
}

absl::Status BadExpression(absl::string_view text, const std::string& error) {
  return Invalid("pattern of modules: got ", Quoted(text, 64),
                 ", expected a regular expression of RE2 (", Quoted(error, 64), ")");
}

}  // namespace

// Packs expressions into sets as they come.
class LinearRules::Compiler {
 public:
  Compiler(std::vector<Expressions>* out, const std::atomic<bool>* cancelled)
      : out_(*out), cancelled_(cancelled) {}

  absl::Status AddExpression(const std::string& text, int rank) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled_));
    if (text.size() > kMaxRegexBytes) {
      return Invalid("pattern of modules: got ", text.size(),
                     " bytes of a regular expression, expected at most ", kMaxRegexBytes);
    }
    if (++regexes_ > kMaxRegexes) {
      return Invalid("patterns of modules: got more than ", kMaxRegexes,
                     " regular expressions, the limit of all lists together");
    }
    AWQD_ASSIGN_OR_RETURN(const int64_t size, SizeOf(text));
    instructions_ += size;
    if (instructions_ > kMaxInstructions) {
      return Invalid("patterns of modules: got regular expressions of more than ", kMaxInstructions,
                     " instructions of RE2, the limit of all lists together "
                     "(fewer or simpler ones)");
    }
    if (open_size_ + size > kSetInstructions) AWQD_RETURN_IF_ERROR(Finish());
    if (open_ == nullptr) {
      open_ = std::make_unique<RE2::Set>(Options(kSetMemory), RE2::ANCHOR_START);
    }
    std::string error;
    if (open_->Add(text, &error) < 0) return BadExpression(text, error);
    open_size_ += size;
    ranks_.push_back(rank);
    return absl::OkStatus();
  }

  absl::Status Finish() {
    if (open_ == nullptr) return absl::OkStatus();
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled_));
    if (!open_->Compile()) {
      return Invalid("patterns of modules: got ", ranks_.size(), " regular expressions of ",
                     open_size_, " instructions that RE2 cannot match with ", kSetMemory,
                     " bytes, expected simpler ones");
    }
    out_.push_back({std::move(open_), std::move(ranks_)});
    open_ = nullptr;
    ranks_.clear();
    open_size_ = 0;
    return absl::OkStatus();
  }

 private:
  // Its length counts too: what is simplified away takes memory until it is.
  static absl::StatusOr<int64_t> SizeOf(const std::string& text) {
    const RE2 alone(text, Options(kRegexMemory));
    if (!alone.ok()) return BadExpression(text, alone.error());
    return alone.ProgramSize() + static_cast<int64_t>(text.size());
  }

  std::vector<Expressions>& out_;
  const std::atomic<bool>* const cancelled_;
  size_t regexes_ = 0;
  int64_t instructions_ = 0;
  std::unique_ptr<RE2::Set> open_;  // not compiled yet
  std::vector<int> ranks_;
  int64_t open_size_ = 0;
};

absl::Status LinearRules::AddPatterns(const std::vector<ModulePattern>& patterns, int rank,
                                      Compiler* compiler) {
  for (const ModulePattern& pattern : patterns) {
    switch (pattern.kind) {
      case ModulePattern::Kind::kEvery:
        every_ = std::min(every_, rank);
        break;
      case ModulePattern::Kind::kExact:
        exact_.emplace(pattern.text, rank);
        break;
      case ModulePattern::Kind::kContains:
        contained_.emplace_back(pattern.text, rank);
        break;
      case ModulePattern::Kind::kRegex:
        AWQD_RETURN_IF_ERROR(compiler->AddExpression(pattern.text, rank));
        break;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<LinearRules> LinearRules::Make(const QuantConfig& config,
                                              const std::atomic<bool>* cancelled) {
  LinearRules out;
  out.every_ = kNone;
  Compiler compiler(&out.expressions_, cancelled);
  AWQD_RETURN_IF_ERROR(out.AddPatterns(config.left_out, 0, &compiler));
  for (const LinearRule& rule : config.rules) {
    out.rules_.push_back(
        std::make_unique<const LinearRule>(LinearRule{{}, rule.settings, rule.format}));
    AWQD_RETURN_IF_ERROR(
        out.AddPatterns(rule.targets, static_cast<int>(out.rules_.size()), &compiler));
  }
  AWQD_RETURN_IF_ERROR(compiler.Finish());
  return out;
}

absl::StatusOr<const LinearRule*> LinearRules::RuleOf(absl::string_view path,
                                                      const std::atomic<bool>* cancelled) const {
  int least = every_;
  if (const auto it = exact_.find(path); it != exact_.end()) least = std::min(least, it->second);
  for (const auto& [text, rank] : contained_) {
    if (rank >= least) break;
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled));
    if (absl::StrContains(path, text)) least = rank;
  }
  std::vector<int> matches;
  for (const Expressions& some : expressions_) {
    if (some.ranks.front() >= least) break;
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled));
    RE2::Set::ErrorInfo error = {};
    // Most paths match nothing, which is found out without a list.
    if (some.set->Match({path.data(), path.size()}, nullptr, &error)) {
      some.set->Match({path.data(), path.size()}, &matches, &error);
    }
    if (error.kind != RE2::Set::kNoError) {
      return Invalid("patterns of modules: got ", some.ranks.size(),
                     " regular expressions that RE2 cannot match ", Quoted(path), " with ",
                     kSetMemory, " bytes, expected simpler ones");
    }
    for (const int match : matches) least = std::min(least, some.ranks[match]);
    matches.clear();
  }
  return least == 0 || least == kNone ? nullptr : rules_[least - 1].get();
}

}  // namespace awqd::model
