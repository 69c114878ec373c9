// Checking and cutting tensors that hold all experts.
#include "kernels/checkpoint/expert_slices.h"

#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/expert_path.h"
#include "kernels/checkpoint/safetensors.h"

namespace awqd::model {
namespace {

absl::Status BadShape(const LinearLocation& linear, absl::string_view suffix,
                      const TensorInfo& tensor, absl::string_view expected) {
  return Invalid("weight ", Quoted(linear.path), ": tensor \"", suffix, "\": shape: got [",
                 absl::StrJoin(tensor.shape, ", "), "] of ", tensor.dtype, ", expected ", expected);
}

bool IsCut(const LinearLocation& linear, absl::string_view suffix) {
  return !absl::c_linear_search(linear.rule->format->uncut_suffixes, suffix);
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

bool HoldsAllExperts(const LinearLocation& linear) {
  return IsPathOfAllExperts(linear.path) &&
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
                   " tensors of experts, expected at most that");
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
