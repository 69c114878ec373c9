// Matching of module paths.
#include "kernels/checkpoint/linear_rules.h"

#include <re2/re2.h>

#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/file.h"

namespace awqd::model {
namespace {

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

// The components that wrappers put before the paths of a model: "model.language_model.layers.0" in
// one file is "layers.0" in another.
absl::string_view WithoutWrappers(absl::string_view path) {
  for (absl::string_view rest = path;; path = rest) {
    const bool wrapped =
        absl::ConsumePrefix(&rest, "model.") || absl::ConsumePrefix(&rest, "language_model.");
    if (!wrapped || rest.empty()) return path;
  }
}

// The text that an expression without operators matches: "^model\\.layers\\.0$" and the like. A dot
// that is not escaped stands for a dot. Nothing for other expressions.
struct Literal {
  std::string text;
  bool whole = false;  // to the end of the path
};
std::optional<Literal> ParseLiteral(absl::string_view expression) {
  Literal out;
  absl::ConsumePrefix(&expression, "^");
  out.whole = absl::ConsumeSuffix(&expression, "$");
  for (size_t i = 0; i < expression.size(); ++i) {
    const bool escaped = expression[i] == '\\';
    if (escaped && ++i == expression.size()) return std::nullopt;
    const char c = expression[i];
    const bool word = absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_';
    if (escaped ? word : !word && c != '.' && c != '-') return std::nullopt;
    out.text += c;
  }
  return out;
}

size_t CountComponents(absl::string_view path) { return 1 + absl::c_count(path, '.'); }

}  // namespace

// Packs expressions into sets as they come.
class LinearRules::Compiler {
 public:
  Compiler(std::vector<Expressions>* out, const std::atomic<bool>* cancelled)
      : out_(*out), cancelled_(cancelled) {}

  // Sets `unread` to the reason where RE2 does not take the expression.
  absl::Status AddExpression(const std::string& text, int rank, std::string* unread) {
    if (text.size() > kMaxRegexBytes) {
      *unread = absl::StrCat(text.size(), " bytes of a regular expression, expected at most ",
                             kMaxRegexBytes);
      return absl::OkStatus();
    }
    const RE2 alone(text, Options(kRegexMemory));
    if (!alone.ok()) {
      *unread = absl::StrCat(Quoted(text, 64), ", expected a regular expression of RE2 (",
                             Quoted(alone.error(), 64), ")");
      return absl::OkStatus();
    }
    if (++regexes_ > kMaxRegexes) {
      return Invalid("patterns of modules: got more than ", kMaxRegexes,
                     " regular expressions, the limit of all lists together");
    }
    // Its length counts too: what is simplified away takes memory until it is.
    const int64_t size = alone.ProgramSize() + static_cast<int64_t>(text.size());
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
    if (open_->Add(text, &error) < 0) {
      return Invalid("pattern of modules: got ", Quoted(text, 64), ": ", Quoted(error, 64));
    }
    open_size_ += size;
    ranks_.push_back(rank);
    return absl::OkStatus();
  }

  absl::Status CheckCancelled() const { return model::CheckCancelled(cancelled_); }

  absl::Status Finish() {
    if (open_ == nullptr) return absl::OkStatus();
    AWQD_RETURN_IF_ERROR(CheckCancelled());
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
  std::vector<Expressions>& out_;
  const std::atomic<bool>* const cancelled_;
  size_t regexes_ = 0;
  int64_t instructions_ = 0;
  std::unique_ptr<RE2::Set> open_;  // not compiled yet
  std::vector<int> ranks_;
  int64_t open_size_ = 0;
};

absl::Status LinearRules::AddExpression(const std::string& text, int rank, Compiler* compiler) {
  if (const std::optional<Literal> literal = ParseLiteral(text)) {
    if (literal->whole) {
      paths_[std::string(WithoutWrappers(literal->text))].push_back(rank);
    } else {
      prefix_bytes_.insert(literal->text.size());
      prefixes_[literal->text].push_back(rank);
    }
    return absl::OkStatus();
  }
  std::string unread;
  AWQD_RETURN_IF_ERROR(compiler->AddExpression(text, rank, &unread));
  if (!unread.empty() && unread_++ == 0) note_ = absl::StrCat("pattern of modules: got ", unread);
  return absl::OkStatus();
}

absl::Status LinearRules::AddPatterns(const std::vector<ModulePattern>& patterns, int rank,
                                      Compiler* compiler) {
  for (const ModulePattern& pattern : patterns) {
    AWQD_RETURN_IF_ERROR(compiler->CheckCancelled());
    absl::string_view text = pattern.text;
    switch (pattern.kind) {
      case ModulePattern::Kind::kEvery:
        every_.push_back(rank);
        break;
      case ModulePattern::Kind::kPath:
        paths_[std::string(WithoutWrappers(text))].push_back(rank);
        break;
      case ModulePattern::Kind::kContains:
        absl::ConsumeSuffix(&text, ".");
        text = WithoutWrappers(text);
        contained_components_.insert(CountComponents(text));
        contained_[std::string(text)].push_back(rank);
        break;
      case ModulePattern::Kind::kRegex:
        AWQD_RETURN_IF_ERROR(AddExpression(pattern.text, rank, compiler));
        break;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<LinearRules> LinearRules::Make(const QuantConfig& config,
                                              const std::atomic<bool>* cancelled) {
  LinearRules out;
  Compiler compiler(&out.expressions_, cancelled);
  AWQD_RETURN_IF_ERROR(out.AddPatterns(config.left_out, 0, &compiler));
  for (const LinearRule& rule : config.rules) {
    out.rules_.push_back(std::make_unique<const LinearRule>(
        LinearRule{{}, rule.settings, rule.format, rule.unread}));
    AWQD_RETURN_IF_ERROR(
        out.AddPatterns(rule.targets, static_cast<int>(out.rules_.size()), &compiler));
  }
  AWQD_RETURN_IF_ERROR(compiler.Finish());
  if (out.unread_ > 1) absl::StrAppend(&out.note_, " and ", out.unread_ - 1, " more");
  if (config.additions.empty()) return out;
  QuantConfig pairs;
  for (const QuantConfig::Addition& addition : config.additions) {
    pairs.rules.push_back({.targets = addition.left_out});
    pairs.rules.push_back(addition.rule);
  }
  AWQD_ASSIGN_OR_RETURN(LinearRules additions, Make(pairs, cancelled));
  if (additions.unread_ > 0) {  // its addition may be for any linear
    const absl::Status unread = absl::UnimplementedError(additions.note_);
    AWQD_ASSIGN_OR_RETURN(additions,
                          Make({.rules = {{}, {.targets = {{}}, .unread = unread}}}, cancelled));
  }
  out.additions_ = std::make_unique<const LinearRules>(std::move(additions));
  return out;
}

absl::StatusOr<std::vector<int>> LinearRules::LookUp(absl::string_view path,
                                                     const std::atomic<bool>* cancelled) const {
  std::vector<int> out = every_;
  // Whether one of them is a rule's.
  const auto add = [&out](const Ranks& ranks, absl::string_view text) {
    const auto it = ranks.find(text);
    if (it == ranks.end()) return false;
    out.insert(out.end(), it->second.begin(), it->second.end());
    return it->second.back() > 0;
  };
  for (const size_t bytes : prefix_bytes_) {
    if (bytes > path.size()) break;
    add(prefixes_, path.substr(0, bytes));
  }
  const absl::string_view own = WithoutWrappers(path);
  // A path holds for all that is beneath it, unless another rule has a deeper one.
  for (absl::string_view above = own; !paths_.empty() && !add(paths_, above);) {
    const size_t dot = above.rfind('.');
    if (dot == absl::string_view::npos) break;
    above = above.substr(0, dot);
  }
  if (contained_.empty()) return out;
  std::vector<size_t> begins = {0};  // of the components, and behind the last one
  for (size_t i = 0; i < own.size(); ++i) {
    if (own[i] == '.') begins.push_back(i + 1);
  }
  begins.push_back(own.size() + 1);
  for (const size_t components : contained_components_) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled));
    for (size_t i = 0; i + components < begins.size(); ++i) {
      add(contained_, own.substr(begins[i], begins[i + components] - 1 - begins[i]));
    }
  }
  return out;
}

absl::Status LinearRules::VisitRules(absl::string_view path,
                                     absl::FunctionRef<bool(const LinearRule* rule)> visit,
                                     const std::atomic<bool>* cancelled) const {
  AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled));
  AWQD_ASSIGN_OR_RETURN(std::vector<int> ranks, LookUp(path, cancelled));
  int visited = -1;
  // Visits those below `end`, each once. False: it is over.
  const auto visit_below = [&](int end) {
    absl::c_sort(ranks);
    size_t i = 0;
    for (; i < ranks.size() && ranks[i] < end; ++i) {
      if (ranks[i] == visited) continue;
      visited = ranks[i];
      if (!visit(visited == 0 ? nullptr : rules_[visited - 1].get())) return false;
    }
    ranks.erase(ranks.begin(), ranks.begin() + static_cast<ptrdiff_t>(i));
    return true;
  };
  std::vector<int> matches;
  for (const Expressions& some : expressions_) {
    if (!visit_below(some.ranks.front())) return absl::OkStatus();
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
    for (const int match : matches) ranks.push_back(some.ranks[match]);
    matches.clear();
  }
  visit_below(static_cast<int>(rules_.size()) + 1);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<const LinearRule*>> LinearRules::FindAdditions(
    absl::string_view path, const std::atomic<bool>* cancelled) const {
  std::vector<const LinearRule*> out;
  if (additions_ == nullptr) return out;
  std::set<const LinearRule*> matches;
  const auto add = [&](const LinearRule* rule) {
    matches.insert(rule);
    return true;
  };
  AWQD_RETURN_IF_ERROR(additions_->VisitRules(path, add, cancelled));
  for (size_t i = 0; i < additions_->all().size() && !matches.empty(); i += 2) {
    const LinearRule* const rule = additions_->all()[i + 1].get();
    const bool left_out = matches.contains(additions_->all()[i].get());
    if (!left_out && matches.contains(rule)) out.push_back(rule);
  }
  return out;
}

absl::StatusOr<const LinearRule*> LinearRules::RuleOf(absl::string_view path,
                                                      const std::atomic<bool>* cancelled) const {
  const LinearRule* out = nullptr;
  const auto keep_first = [&out](const LinearRule* rule) {
    out = rule;
    return false;
  };
  AWQD_RETURN_IF_ERROR(VisitRules(path, keep_first, cancelled));
  return out;
}

}  // namespace awqd::model
