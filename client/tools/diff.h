// Diff: two folders compared linear by linear; Difference: two matrices, element by element.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/tools/elements.h"
#include "client/tools/model.h"

namespace awqd::tools {

struct DifferentElement {
  int64_t k = 0, n = 0;
  float a = 0, b = 0;
};

// |a - b|: infinite where just one is NaN, or an infinity meets another number; 0 for two NaNs.
inline double Distance(float a, float b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  const double distance = std::fabs(static_cast<double>(a) - static_cast<double>(b));
  return std::isnan(distance) ? HUGE_VAL : distance;
}

// The squares of the Frobenius norms |A - B| and |B|.
struct SquaredNorms {
  double difference = 0, b = 0;

  void Add(const SquaredNorms& other) {
    difference += other.difference;
    b += other.b;
  }
  // |A - B| / |B|; 0 only where nothing differs.
  double relative() const;
};

// Whether two numbers have the same bits, or are both NaN.
inline bool SameBits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

// Elements of two matrices of one shape.
struct Difference {
  size_t keep = 0;        // so many of the worst
  int64_t different = 0;  // elements whose bits differ, other than one NaN from another
  double largest = 0;     // |A - B|; infinite where one is NaN or an infinity and the other is not
  SquaredNorms norms;
  std::vector<DifferentElement> worst;  // by |A - B|, the largest first

  void AddElement(int64_t k, int64_t n, float a, float b);
  // Adds elements to `largest` and `norms` alone.
  void AddNorms(const float* a, const float* b, int64_t count);
};

// Adds every element of two matrices of one shape.
absl::Status Compare(const Elements& a, const Elements& b, Difference* out);

// How many elements of two vectors are not alike; all where one is longer.
int64_t DifferentBias(const std::vector<float>& a, const std::vector<float>& b);

struct LinearDifference : Difference {
  std::string path;
  std::string a, b;  // schemes, or the type of a dense one
  int64_t k = 0, n = 0;
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
