// What the versions of AWQ's tensors have in common: their settings, what zero_point says of the
// zero points, and scales that are padded to whole words.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/formats/format.h"

namespace awqd {

inline constexpr absl::string_view kAwqSettings[] = {"bits", "group_size", "version", "zero_point"};

struct AwqLinear {
  int bits = 4;
  int64_t group_size = 0;          // -1: all of K; 0: not said
  std::optional<bool> zero_point;  // false: every zero point is 2^(bits-1)

  int middle() const { return 1 << (bits - 1); }
};

// What one format reads of AWQ's versions.
struct AwqVersion {
  absl::Span<const absl::string_view> names;  // "" where nothing said is meant
  int min_bits = 4, max_bits = 4;
};

// The settings of one linear. UNIMPLEMENTED for other versions and widths.
absl::StatusOr<AwqLinear> ReadAwqLinear(const Setting& object, const AwqVersion& version);
// Those of a checkpoint: Format::read.
absl::StatusOr<QuantConfig> ReadAwqConfig(const Setting& config, const AwqVersion& version);

// Zero points [groups, N] that tensor `name` has. With zero_point false each has to be 2^(bits-1),
// and becomes the scheme's constant.
absl::Status SetAwqZeros(const AwqLinear& settings, absl::string_view name,
                         std::vector<uint8_t> zeros, HostWeight* out);
// Where tensor `name` is missing: that constant, or an error that expects `expected`.
absl::Status SetAwqZerosWithout(const AwqLinear& settings, absl::string_view name,
                                absl::string_view expected, HostWeight* out);
// Format::lacks: "qzeros", unless zero_point is false.
absl::string_view AwqLacks(const Setting& settings, HasTensor has);

// Groups of K, and how many scales a column has: eight zero points fill a word, and of groups of
// 64, 32 and 16 the words are multiples of 2, 4 and 8.
struct PaddedGroups {
  int64_t rows = 0;
  int64_t groups = 0;
  int64_t padded = 0;
};
absl::StatusOr<PaddedGroups> PadAwqGroups(const AwqLinear& settings, int64_t k);

// Of scales FP16 or BF16 [padded, N] those of groups. The others have to be 0, and no group is 0 in
// all columns, which tells a group_size that is another's.
absl::StatusOr<std::vector<uint8_t>> UnpadGroups(const PaddedGroups& of, int64_t n,
                                                 absl::Span<const uint8_t> scales);

}  // namespace awqd
