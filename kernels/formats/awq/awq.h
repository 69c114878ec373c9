// The common parts of AWQ's versions: their settings, and the meaning of zero_point.
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

// The versions and widths that one format reads.
struct AwqVersion {
  absl::Span<const absl::string_view> names;  // "" where nothing said is meant
  int min_bits = 4, max_bits = 4;
};

// The settings of one linear. UNIMPLEMENTED for other versions and widths.
absl::StatusOr<AwqLinear> ReadAwqLinear(const Setting& object, const AwqVersion& version);
// Those of a checkpoint: Format::read.
absl::StatusOr<QuantConfig> ReadAwqConfig(const Setting& config, const AwqVersion& version);

// The names of the tensors of version gemm.
struct AwqTensors {
  absl::string_view codes = "qweight", zeros = "qzeros", scales = "scales";
};
// Decodes version gemm.
absl::StatusOr<HostWeight> DecodeAwq(const AwqLinear& settings, const AwqTensors& names,
                                     const LinearTensors& tensors);

// Zero points [groups, N] that tensor `name` has. With zero_point false each has to be 2^(bits-1),
// and becomes the scheme's constant.
absl::Status SetAwqZeros(const AwqLinear& settings, absl::string_view name,
                         std::vector<uint8_t> zeros, HostWeight* out);
// Where tensor `name` is missing: that constant, or an error that expects `expected`.
absl::Status SetAwqZerosWithout(const AwqLinear& settings, absl::string_view name,
                                absl::string_view expected, HostWeight* out);
// Format::lacks: "qzeros", unless zero_point is false.
absl::string_view AwqLacks(const Setting& settings, HasTensor has);

}  // namespace awqd
