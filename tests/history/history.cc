// The times in which a version may have been live, and the answers that no version explains.
#include "tests/history/history.h"

#include <algorithm>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"

namespace awqd::history {
namespace {

constexpr int64_t kBeginning = std::numeric_limits<int64_t>::min();
constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

struct Span {
  int version;
  int64_t from, to;
};
using Spans = std::map<std::string, std::vector<Span>>;

// When the first change that begins at `time` or later has ended.
int64_t Replaced(const std::vector<Change>& changes, const std::string& model, int64_t time) {
  int64_t end = kForever;
  for (const Change& change : changes) {
    if (change.model == model && change.begin >= time) end = std::min(end, change.end);
  }
  return end;
}

Spans SpansOf(const std::vector<Change>& changes) {
  Spans spans;
  for (const Change& change : changes) {
    spans[change.model].push_back(
        {change.version, change.begin, Replaced(changes, change.model, change.end)});
  }
  for (auto& [model, of_model] : spans) {
    of_model.push_back({kNone, kBeginning, Replaced(changes, model, kBeginning)});
  }
  return spans;
}

bool Possible(const std::vector<Span>& spans, const Answer& answer) {
  return std::any_of(spans.begin(), spans.end(), [&](const Span& span) {
    return span.version == answer.version && span.from <= answer.end && span.to >= answer.begin;
  });
}

std::string Shown(int version) {
  if (version == kNone) return "\"not loaded\"";
  return version == kWrong ? "of no version" : absl::StrCat("of version ", version);
}

// The versions that the answer may have.
std::string Expected(const std::vector<Span>& spans, const Answer& answer) {
  std::string out;
  for (const Span& span : spans) {
    if (span.from > answer.end || span.to < answer.begin) continue;
    absl::StrAppend(&out, out.empty() ? "" : " or ", Shown(span.version));
  }
  return out;
}

}  // namespace

std::vector<std::string> Impossible(const std::vector<Change>& changes,
                                    const std::vector<Answer>& answers) {
  Spans spans = SpansOf(changes);
  std::vector<std::string> out;
  for (const Answer& answer : answers) {
    std::vector<Span>& of_model = spans[answer.model];
    if (of_model.empty()) of_model.push_back({kNone, kBeginning, kForever});
    if (Possible(of_model, answer)) continue;
    out.push_back(absl::StrCat("client ", answer.client, ", model ", answer.model, ", from ",
                               answer.begin, " to ", answer.end, " ns: got an answer ",
                               Shown(answer.version), ", expected ", Expected(of_model, answer)));
  }
  return out;
}

}  // namespace awqd::history
