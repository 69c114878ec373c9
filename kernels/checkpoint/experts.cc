// Parsing and making the paths of experts; slicing tensors that hold all of them.
#include "kernels/checkpoint/experts.h"

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/checkpoint/containers/safetensors.h"

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

absl::Status BadShape(const LinearLocation& linear, absl::string_view suffix,
                      const TensorInfo& tensor, absl::string_view expected) {
  return Invalid("weight ", Quoted(linear.path), ": tensor \"", suffix, "\": shape: got [",
                 absl::StrJoin(tensor.shape, ", "), "] of ", tensor.dtype, ", expected ", expected);
}

// Whether each expert has a part of the tensor. One number may be that of all experts.
bool IsCut(const LinearLocation& linear, absl::string_view suffix) {
  const Format& format = *linear.rule->format;
  if (absl::c_linear_search(format.uncut_suffixes, suffix)) return false;
  if (!absl::c_linear_search(format.optional_suffixes, suffix)) return true;
  const std::vector<int64_t>& shape = linear.tensors.find(suffix)->second.info->shape;
  const int64_t experts = linear.codes().info->shape.front();
  return !shape.empty() && (shape != std::vector<int64_t>{1} || experts == 1);
}

// Whether the path is "...experts.<projection>".
bool HasParentOfExperts(absl::string_view path) {
  const std::vector<absl::string_view> components = absl::StrSplit(path, '.');
  const size_t count = components.size();
  return count >= 2 && components[count - 2] == kParent && !components.back().empty() &&
         !ExpertNumber(components.back());
}

absl::StatusOr<int64_t> CountExperts(const LinearLocation& linear) {
  const absl::string_view marker = linear.rule->format->suffixes.front();
  const TensorInfo& codes = *linear.codes().info;
  const int64_t experts = codes.shape.front();
  if (experts < 1 || experts > kMaxExperts) {
    return BadShape(linear, marker, codes,
                    absl::StrCat("1 to ", kMaxExperts, " experts in the first dimension"));
  }
  for (const auto& [suffix, location] : linear.tensors) {
    if (!IsCut(linear, suffix)) continue;
    const TensorInfo& tensor = *location.info;
    if (tensor.shape.empty() || tensor.shape.front() != experts) {
      return BadShape(
          linear, suffix, tensor,
          absl::StrCat(experts, " experts in the first dimension, as tensor \"", marker, "\" has"));
    }
    if (tensor.bytes() % experts != 0) {  // which types of less than a byte may have
      return BadShape(linear, suffix, tensor, "whole bytes for each expert");
    }
  }
  return experts;
}

TensorInfo Slice(const TensorInfo& tensor, int64_t expert, int64_t experts) {
  const int64_t bytes = tensor.bytes() / experts;
  TensorInfo out;
  out.dtype = tensor.dtype;
  out.shape.assign(tensor.shape.begin() + 1, tensor.shape.end());
  out.begin = tensor.begin + expert * bytes;
  out.end = out.begin + bytes;
  return out;
}

}  // namespace

std::optional<ExpertPath> ParseExpertPath(absl::string_view path) {
  std::vector<absl::string_view> components = absl::StrSplit(path, '.');
  const auto at = [&](size_t i) -> std::optional<ExpertPath> {
    const std::optional<int64_t> expert = ExpertNumber(components[i]);
    if (!expert) return std::nullopt;
    components[i] = "*";
    return ExpertPath{absl::StrJoin(components, "."), *expert};
  };
  for (size_t i = components.size() - 1; i > 0; --i) {
    if (components[i - 1] != kParent) continue;
    if (auto found = at(i)) return found;
    // "experts.up_proj.3": the number stands behind the projection.
    if (i + 2 == components.size()) {
      if (auto found = at(i + 1)) return found;
    }
  }
  return std::nullopt;
}

bool IsPathOfAllExperts(absl::string_view path) {
  return absl::EndsWith(path, kGgufSuffix) || HasParentOfExperts(path);
}

std::string PathOfExpert(absl::string_view path, int64_t expert) {
  if (!HasParentOfExperts(path)) return absl::StrCat(path, ".", kParent, ".", expert);
  const size_t dot = path.rfind('.');
  return absl::StrCat(path.substr(0, dot), ".", expert, path.substr(dot));
}

bool HoldsAllExperts(const LinearLocation& linear) {
  // GGUF names what holds experts. Its other tensors of three dimensions have a matrix a head.
  if (linear.rule->format == &kGgufFormat && !IsPathOfAllExperts(linear.path)) return false;
  const size_t dot = linear.path.rfind('.');
  return !ExpertNumber(linear.path.substr(dot + 1)) &&
         static_cast<int>(linear.codes().info->shape.size()) == linear.rule->format->code_rank + 1;
}

absl::StatusOr<std::vector<LinearLocation>> SliceExperts(const LinearLocation& linear,
                                                         std::deque<TensorInfo>* slices) {
  AWQD_ASSIGN_OR_RETURN(const int64_t experts, CountExperts(linear));
  // A header of a few bytes for each tensor must not take memory for each expert without bound.
  const int64_t most = SafetensorsLimits().max_tensors;
  const auto tensors = static_cast<int64_t>(linear.tensors.size());
  if (static_cast<int64_t>(slices->size()) + experts * tensors > most) {
    return Invalid("weight ", Quoted(linear.path), ": ", experts, " experts: got more than ", most,
                   " tensors of experts, the limit");
  }
  std::vector<LinearLocation> out;
  for (int64_t expert = 0; expert < experts; ++expert) {
    LinearLocation& one = out.emplace_back();
    one.path = PathOfExpert(linear.path, expert);
    one.slice_of = linear.path;
    one.experts = experts;
    one.rule = linear.rule;
    for (const auto& [suffix, location] : linear.tensors) {
      const TensorInfo& slice = slices->emplace_back(
          IsCut(linear, suffix) ? Slice(*location.info, expert, experts) : *location.info);
      one.tensors.emplace(suffix, TensorLocation{location.file, &slice});
      one.bytes += slice.bytes();
    }
  }
  return out;
}

}  // namespace awqd::model
