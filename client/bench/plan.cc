// Lists with shares, and sweeps.
#include "client/bench/plan.h"

#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status.h"

namespace awqd::bench {
namespace {

absl::Status Bad(absl::string_view got, absl::string_view expected) {
  return Invalid("got '", got, "', expected ", expected);
}

absl::StatusOr<std::pair<std::string, double>> ParseShare(absl::string_view text) {
  const size_t colon = text.rfind(':');
  double share = 1;
  absl::string_view word = text;
  if (colon != absl::string_view::npos && absl::SimpleAtod(text.substr(colon + 1), &share)) {
    word = text.substr(0, colon);
  } else {
    share = 1;
  }
  if (word.empty() || !(share > 0) || !std::isfinite(share)) {
    return Bad(text, "an entry, or an entry:share with a share above 0");
  }
  return std::pair(std::string(word), share);
}

absl::Status AppendSweep(absl::string_view text, std::vector<double>& values) {
  constexpr char kExpected[] = "a number above 0, or from..to to double from the one to the other";
  const size_t dots = text.find("..");
  double from = 0;
  if (!absl::SimpleAtod(text.substr(0, dots), &from) || !(from > 0) || !(from <= 1e9)) {
    return Bad(text, kExpected);
  }
  if (dots == absl::string_view::npos) {
    values.push_back(from);
    return absl::OkStatus();
  }
  double to = 0;
  if (!absl::SimpleAtod(text.substr(dots + 2), &to) || !(to >= from) || !(to <= 1e9)) {
    return Bad(text, kExpected);
  }
  for (double value = from; value < to; value *= 2) values.push_back(value);
  values.push_back(to);
  return absl::OkStatus();
}

}  // namespace

std::string LoadPoint::Name() const {
  if (open()) return absl::StrFormat("%.6g/s", rate);
  return absl::StrCat(concurrency, concurrency == 1 ? " caller" : " callers");
}

absl::StatusOr<std::vector<std::pair<std::string, double>>> ParseShares(absl::string_view text) {
  std::vector<std::pair<std::string, double>> shares;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    AWQD_ASSIGN_OR_RETURN(auto share, ParseShare(part));
    shares.push_back(std::move(share));
  }
  return shares;
}

absl::StatusOr<std::vector<TokensShare>> ParseTokens(absl::string_view text) {
  AWQD_ASSIGN_OR_RETURN(const auto shares, ParseShares(text));
  std::vector<TokensShare> tokens;
  for (const auto& [word, share] : shares) {
    int64_t count = 0;
    if (!absl::SimpleAtoi(word, &count) || count < 0 || count > int64_t{1} << 24) {
      return Bad(word, "a number of tokens from 0 to 16777216");
    }
    tokens.push_back({count, share});
  }
  return tokens;
}

absl::StatusOr<WeightShare> ParseWeight(absl::string_view text) {
  AWQD_ASSIGN_OR_RETURN(const auto share, ParseShare(text));
  const size_t slash = share.first.find('/');
  if (slash == 0 || slash == std::string::npos || slash + 1 == share.first.size()) {
    return Bad(text, "model/weight, for example my-model/model.layers.0.mlp.up_proj");
  }
  return WeightShare{share.first.substr(0, slash), share.first.substr(slash + 1), share.second};
}

absl::StatusOr<std::vector<double>> ParseSweep(absl::string_view text) {
  std::vector<double> values;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    AWQD_RETURN_IF_ERROR(AppendSweep(part, values));
  }
  return values;
}

}  // namespace awqd::bench
