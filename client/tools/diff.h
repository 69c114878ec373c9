// Diff: how far the weights of two model folders are apart, linear by linear.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/tools/model.h"

namespace awqd::tools {

struct DifferentElement {
  int64_t k = 0, n = 0;
  float a = 0, b = 0;
};

struct LinearDifference {
  std::string path;
  std::string a, b;  // descriptions, or the type of a dense one
  int64_t k = 0, n = 0;
  int64_t different = 0;  // elements whose bits differ, other than one NaN from another
  double largest = 0;     // |A - B|; infinite where one is NaN or an infinity and the other is not
  double relative = 0;    // |A - B| / |B|, Frobenius norms
  std::vector<DifferentElement> worst;  // by |A - B|, the largest first
  // Where both are integers of as many bits.
  std::optional<int64_t> different_codes;
  // Where the groups are the same too.
  std::optional<int64_t> different_zeros, different_scales;
  int64_t different_bias = 0;  // elements
  std::string error;           // why the two cannot be compared

  bool same() const;
};

struct FolderDifference {
  std::vector<LinearDifference> linears;
  // Tensors that are part of no linear in either.
  int64_t same_tensors = 0;
  std::vector<std::string> different_tensors;  // bytes, type or shape
  std::vector<std::string> only_in_a, only_in_b;

  bool same() const;
};

// Compares the linears that are quantised in A or in B, or of two dense models all dense ones.
// `worst`: elements to tell of each. An error where a folder cannot be read.
absl::StatusOr<FolderDifference> Diff(const std::string& a, const std::string& b, int64_t worst,
                                      const Progress& progress);

nlohmann::ordered_json ToJson(const FolderDifference& difference);

}  // namespace awqd::tools
