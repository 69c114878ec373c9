// CanonicalWeight (host, layout-free) and DeviceWeight (in a device's memory, in one kernel
// layout).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/math.h"
#include "kernels/device.h"
#include "kernels/scheme.h"
#include "kernels/types.h"

namespace awqd {

struct KernelRow;
struct Layout;

// What every checkpoint format decodes to. Host memory.
struct CanonicalWeight {
  int64_t k = 0;  // in features (reduction)
  int64_t n = 0;  // out features
  QuantScheme scheme;
  std::string format;  // name of the checkpoint format it came from

  // Codes [K, N], row-major, each in code_bits() bits, least significant first along N.
  std::vector<uint8_t> codes;
  // Zero points [K/g, N], one byte each; empty for ZeroKind::kSymmetric.
  std::vector<uint8_t> zeros;
  // Scales [K/g, N] as stored, raw bits of scheme.scale_dtype.
  std::vector<uint8_t> scales;
  // [N], or empty. FP32 holds FP16 and BF16 biases exactly.
  std::vector<float> bias;

  int code_bits() const { return CodeBits(scheme.bits); }
  int64_t groups() const { return k / scheme.group_size; }
  int64_t row_bytes() const { return CeilDiv(n * code_bits(), 8); }

  int Code(int64_t row, int64_t col) const {
    const int bits = code_bits();
    const int64_t bit = col * bits;
    return (codes[row * row_bytes() + bit / 8] >> (bit % 8)) & ((1 << bits) - 1);
  }
  int Zero(int64_t group, int64_t col) const {
    return zeros.empty() ? 1 << (scheme.bits - 1) : zeros[group * n + col];
  }
  // The stored scale, exactly.
  float Scale(int64_t group, int64_t col) const;
};

// INVALID_ARGUMENT when the scheme is illegal or a member has the wrong number of bytes.
absl::Status Validate(const CanonicalWeight& weight);

// Facts that layouts and kernels size things by.
struct WeightShape {
  int64_t k = 0;
  int64_t n = 0;
  QuantScheme scheme;
  int64_t groups() const { return k / scheme.group_size; }
};

// The sections of a packed weight, one after the other in one allocation, each 256-byte aligned.
struct LayoutExtent {
  int64_t codes_bytes = 0;
  int64_t scales_bytes = 0;
  int64_t zeros_bytes = 0;

  static constexpr int64_t kAlign = 256;
  int64_t scales_offset() const { return RoundUp(codes_bytes, kAlign); }
  int64_t zeros_offset() const { return scales_offset() + RoundUp(scales_bytes, kAlign); }
  int64_t total() const { return zeros_offset() + RoundUp(zeros_bytes, kAlign); }
};

// Which kernel serves which token counts; made once at load, indexed by requests.
struct PlanEntry {
  Path path;
  int64_t min_m = 0;
  int64_t max_m = -1;  // inclusive; -1: no upper bound
  const KernelRow* row = nullptr;
};
struct RefusedRow {
  std::string name;
  std::string reason;
};
struct WeightPlan {
  std::vector<PlanEntry> matmul;  // ascending m within a path
  const KernelRow* dequantize = nullptr;
  std::vector<RefusedRow> refused;

  // The row for m tokens on `path`, or null when the path has none.
  const KernelRow* Matmul(Path path, int64_t m) const;
};

// A weight in a device's memory. Immutable once made; freed when the last owner lets go.
struct DeviceWeight {
  WeightShape shape;
  std::string format;
  const Layout* layout = nullptr;
  LayoutExtent extent;
  Buffer storage;  // device memory, extent.total() bytes
  Buffer bias;     // device memory, FP32 [N], or empty
  Device* device = nullptr;
  WeightPlan plan;

  const uint8_t* codes() const { return static_cast<const uint8_t*>(storage.data()); }
  const uint8_t* scales() const { return codes() + extent.scales_offset(); }
  const uint8_t* zeros() const { return codes() + extent.zeros_offset(); }
  const float* bias_data() const { return static_cast<const float*>(bias.data()); }
  int64_t bytes() const { return storage.size() + bias.size(); }
};

}  // namespace awqd
