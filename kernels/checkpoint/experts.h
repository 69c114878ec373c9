// Experts of a mixture: their paths, and linears that hold all of them in one tensor.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace awqd::model {

struct LinearLocation;
struct TensorInfo;

// Experts are numbered below this.
constexpr int64_t kMaxExperts = 10'000;

// "a.experts.12.up_proj" is expert 12 of the stack "a.experts.*.up_proj".
struct ExpertPath {
  std::string stack;
  int64_t expert = 0;

  friend bool operator==(const ExpertPath&, const ExpertPath&) = default;
};

// The number is the component behind one that is exactly "experts", or the last one behind the
// projection ("a.experts.up_proj.12"): decimal, without leading zeros, below kMaxExperts. Of several
// such components the last one counts. Nothing for other paths.
std::optional<ExpertPath> ParseExpertPath(absl::string_view path);

// Whether a path is usual for a linear that holds all experts of a projection: "a.experts.up_proj",
// whose parent is exactly "experts" and whose last component is no number, and "a.up_exps".
bool IsPathOfAllExperts(absl::string_view path);

// The path of one expert: "a.experts.12.up_proj" for "a.experts.up_proj" and 12, and
// "a.up_exps.experts.12" for "a.up_exps" and any other path.
std::string PathOfExpert(absl::string_view path, int64_t expert);

// Whether the linear's tensor of codes has one rank more than that of a single linear, under any
// path that does not end with an expert's number. In GGUF the path must be a usual one.
bool HoldsAllExperts(const LinearLocation& linear);

// Makes E linears of one, E being the first dimension of every tensor. Expert i gets slice i of
// each tensor, and all of the tensors that the format does not cut (Format::uncut_suffixes) or that
// have one number for all experts. Adds
// one TensorInfo a slice to `slices`; the result points into it. INVALID_ARGUMENT naming the tensor
// when E is 0, above kMaxExperts or not the same everywhere, or when the checkpoint's slices are
// more than the tensors that a file may have.
absl::StatusOr<std::vector<LinearLocation>> SliceExperts(const LinearLocation& linear,
                                                         std::deque<TensorInfo>* slices);

}  // namespace awqd::model
