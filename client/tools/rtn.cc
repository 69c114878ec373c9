// Rounding to nearest, a group at a time.
#include "client/tools/rtn.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"

namespace awqd::tools {
namespace {

constexpr int64_t kElements = 1 << 20;  // read at a time
constexpr int kRatios = 26;             // 1, 0.98, ..., 0.5

float Rounded(float value, DType type) {
  return type == DType::kFp16 ? HalfToFloat(FloatToHalf(value)) : Bf16ToFloat(FloatToBf16(value));
}

// The smallest scale that is none.
float Least(DType type) { return type == DType::kFp16 ? 0x1p-24f : 0x1p-126f; }

struct Range {
  float low = 0, high = 0;
};

// False where the scale is infinite.
bool GroupOf(const Range& range, const RtnOptions& options, DType type, RtnGroup* out) {
  const int most = (1 << options.bits) - 1, middle = 1 << (options.bits - 1);
  const double scale =
      options.symmetric ? std::max(double{range.high} / (middle - 1), -double{range.low} / middle)
                        : (double{range.high} - double{range.low}) / most;
  out->scale = scale == 0 ? 1.0f : std::max(Rounded(static_cast<float>(scale), type), Least(type));
  out->zero = middle;
  if (!options.symmetric && scale != 0) {
    out->zero = static_cast<int>(
        std::clamp(std::nearbyint(-range.low / out->scale), 0.0f, static_cast<float>(most)));
  }
  return std::isfinite(out->scale);
}

// To the nearest integer, even where two are as near, of numbers well below 2^22.
inline float Nearest(float value) {
  constexpr float kUnit = 0x1.8p23f;  // the last place of it is 1
  return (value + kUnit) - kUnit;
}

// The codes, and the sum of squared errors.
double Encode(absl::Span<const float> values, const RtnOptions& options, const RtnGroup& group,
              uint8_t* codes) {
  const float most = static_cast<float>((1 << options.bits) - 1);
  const auto zero = static_cast<float>(group.zero);
  for (size_t i = 0; i < values.size(); ++i) {
    const float code = Nearest(std::clamp(values[i] / group.scale, -1024.0f, 1024.0f)) + zero;
    codes[i] = static_cast<uint8_t>(std::clamp(code, 0.0f, most));
  }
  double sum = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double error = double{(static_cast<float>(codes[i]) - zero) * group.scale} - values[i];
    sum += error * error;
  }
  return sum;
}

}  // namespace

bool QuantizeGroup(absl::Span<const float> values, const RtnOptions& options, DType scale_dtype,
                   RtnGroup* group, uint8_t* codes) {
  Range range;
  for (const float value : values) {
    range.low = std::min(range.low, value);
    range.high = std::max(range.high, value);
  }
  if (!GroupOf(range, options, scale_dtype, group)) return false;
  double least = Encode(values, options, *group, codes);
  if (!options.search || least == 0) return true;
  std::vector<uint8_t> other(values.size());
  for (int step = 1; step < kRatios; ++step) {
    const float ratio = 1.0f - 0.02f * static_cast<float>(step);
    RtnGroup narrow;
    GroupOf({range.low * ratio, range.high * ratio}, options, scale_dtype, &narrow);
    const double error = Encode(values, options, narrow, other.data());
    if (error >= least) continue;
    least = error;
    *group = narrow;
    std::copy(other.begin(), other.end(), codes);
  }
  return true;
}

absl::StatusOr<HostWeight> Rtn(int64_t k, int64_t n, const RtnOptions& options, DType scale_dtype,
                               ReadDenseRows read) {
  const int64_t rows = options.group_size == -1 ? k : options.group_size, groups = k / rows;
  HostWeight out = {.k = k, .n = n};
  const int64_t block = rows == k ? 0 : rows;
  out.scheme = options.symmetric ? Symmetric(options.bits, block, scale_dtype)
                                 : Asymmetric(options.bits, block, scale_dtype);
  std::vector<uint8_t> codes(n * k);  // [N, K]
  out.scales.resize(groups * n * SizeOf(scale_dtype));
  if (!options.symmetric) out.zeros.resize(groups * n);
  const int64_t step = std::max<int64_t>(1, kElements / k);
  std::vector<float> values(step * k);
  for (int64_t begin = 0; begin < n; begin += step) {
    const int64_t end = std::min(n, begin + step);
    AWQD_RETURN_IF_ERROR(read(begin, end, values.data()));
    for (int64_t col = begin; col < end; ++col) {
      const float* const row = values.data() + (col - begin) * k;
      const float* const bad =
          std::find_if_not(row, row + k, [](float v) { return std::isfinite(v); });
      if (bad != row + k) {
        return BadValue("weight", absl::StrCat(*bad, " at [", col, ", ", bad - row, "]"),
                        "finite numbers");
      }
      for (int64_t g = 0; g < groups; ++g) {
        RtnGroup group;
        if (!QuantizeGroup({row + g * rows, static_cast<size_t>(rows)}, options, scale_dtype,
                           &group, codes.data() + col * k + g * rows)) {
          return BadValue("weight", absl::StrCat("a group at [", col, ", ", g * rows, "]"),
                          absl::StrCat("one whose scale ", Name(scale_dtype), " can hold"));
        }
        const uint16_t scale =
            scale_dtype == DType::kFp16 ? FloatToHalf(group.scale) : FloatToBf16(group.scale);
        std::memcpy(out.scales.data() + 2 * (g * n + col), &scale, 2);
        if (!options.symmetric) out.zeros[g * n + col] = static_cast<uint8_t>(group.zero);
      }
    }
  }
  out.codes =
      PackTransposed(n, k, options.bits, [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
        std::copy_n(codes.data() + row * k + col, count, to);
      });
  return out;
}

}  // namespace awqd::tools
