// Paths of the experts of a mixture of experts, and of the stacks that they make up.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace awqd::model {

// Numbers of experts are below this: four digits.
constexpr int64_t kMaxExperts = 10'000;

// "a.experts.12.up_proj" is expert 12 of the stack "a.experts.*.up_proj".
struct ExpertPath {
  std::string stack;
  int64_t expert = 0;

  friend bool operator==(const ExpertPath&, const ExpertPath&) = default;
};

// The number is the component behind one that is exactly "experts": decimal, without leading zeros,
// below kMaxExperts. Of several such components the last one counts. Nothing for other paths.
std::optional<ExpertPath> ParseExpertPath(absl::string_view path);

// Whether a linear of that path may hold all experts of a projection: "a.experts.up_proj", whose
// parent is exactly "experts" and which is not itself numbered as an expert is, or "a.up_exps".
bool IsPathOfAllExperts(absl::string_view path);

// Of "a.experts.up_proj" and 12, "a.experts.12.up_proj"; of "a.up_exps", "a.up_exps.experts.12".
// IsPathOfAllExperts(path) holds.
std::string PathOfExpert(absl::string_view path, int64_t expert);

}  // namespace awqd::model
