// Parsing and making the paths of experts.
#include "kernels/checkpoint/expert_path.h"

#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace awqd::model {
namespace {

constexpr absl::string_view kParent = "experts";
constexpr absl::string_view kGgufSuffix = "_exps";  // of what stands for "experts" in GGUF
constexpr size_t kMaxDigits = 4;

std::optional<int64_t> ExpertNumber(absl::string_view component) {
  int64_t number = 0;
  if (component.empty() || component.size() > kMaxDigits) return std::nullopt;
  if (component.size() > 1 && component.front() == '0') return std::nullopt;
  // SimpleAtoi alone would take signs and spaces.
  if (!absl::c_all_of(component, [](unsigned char c) { return absl::ascii_isdigit(c); }) ||
      !absl::SimpleAtoi(component, &number)) {
    return std::nullopt;
  }
  return number;
}

}  // namespace

std::optional<ExpertPath> ParseExpertPath(absl::string_view path) {
  std::vector<absl::string_view> components = absl::StrSplit(path, '.');
  for (size_t i = components.size() - 1; i > 0; --i) {
    if (components[i - 1] != kParent) continue;
    const std::optional<int64_t> expert = ExpertNumber(components[i]);
    if (!expert) continue;
    components[i] = "*";
    return ExpertPath{absl::StrJoin(components, "."), *expert};
  }
  return std::nullopt;
}

bool IsPathOfAllExperts(absl::string_view path) {
  if (absl::EndsWith(path, kGgufSuffix)) return true;
  const std::vector<absl::string_view> components = absl::StrSplit(path, '.');
  const size_t count = components.size();
  return count >= 2 && components[count - 2] == kParent && !components.back().empty() &&
         !ExpertNumber(components.back());
}

std::string PathOfExpert(absl::string_view path, int64_t expert) {
  if (absl::EndsWith(path, kGgufSuffix)) return absl::StrCat(path, ".", kParent, ".", expert);
  const size_t dot = path.rfind('.');
  return absl::StrCat(path.substr(0, dot), ".", expert, path.substr(dot));
}

}  // namespace awqd::model
