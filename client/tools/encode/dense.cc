// Target "dense": the tensor "weight" [N, K] of a linear that is not quantised, each element
// rounded once to its type. FP32 keeps every bit.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/tools/elements.h"
#include "client/tools/encode/pack.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

constexpr int64_t kTile = 16;  // in-features whose elements are turned around at a time

// False where a number becomes an infinity.
bool Store(float value, DType type, uint8_t* to) {
  if (type == DType::kFp32) {
    std::memcpy(to, &value, sizeof(value));
    return true;
  }
  const uint16_t bits = type == DType::kFp16 ? FloatToHalf(value) : FloatToBf16(value);
  std::memcpy(to, &bits, sizeof(bits));
  return std::isfinite(LoadElement(to, type, 0)) || !std::isfinite(value);
}

// Columns [begin, end) of W as rows of K elements.
absl::Status Fill(const HostWeight& weight, DType type, int64_t begin, int64_t end, uint8_t* to) {
  const int64_t k = weight.k, columns = end - begin, size = SizeOf(type);
  // A column range starts at a whole byte of codes.
  const int64_t first = begin / 8 * 8;
  RowReader rows(&weight, first, end);
  std::vector<float> tile(kTile * (end - first));
  for (int64_t row = 0; row < k; row += kTile) {
    const int64_t count = std::min(kTile, k - row);
    for (int64_t i = 0; i < count; ++i) rows.Read(row + i, tile.data() + i * (end - first));
    for (int64_t col = 0; col < columns; ++col) {
      for (int64_t i = 0; i < count; ++i) {
        const float value = tile[i * (end - first) + begin - first + col];
        if (Store(value, type, to + (col * k + row + i) * size)) continue;
        return BadValue("elements", absl::StrCat(value, " at [", row + i, ", ", begin + col, "]"),
                        absl::StrCat("numbers within the range of ", TypeName(type)));
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<EncodedLinear> Encode(HostWeight given, const EncodeOptions& options) {
  if (!given.factor.empty()) {
    return BadValue("factor", "one for each in-feature, which activations are multiplied by",
                    "none, as a dense weight has no place for it");
  }
  const DType type = FloatTypeNamed(options.dtype);
  const auto weight = std::make_shared<const HostWeight>(std::move(given));
  EncodedLinear out = {.tensors = BiasOf(*weight, options), .facts = FactsOf(*weight)};
  const int64_t row_bytes = weight->k * SizeOf(type);
  out.tensors.push_back({.name = "weight",
                         .dtype = options.dtype,
                         .shape = {weight->n, weight->k},
                         .bytes = weight->n * row_bytes,
                         .unit = row_bytes,
                         .read = [weight, type, row_bytes](int64_t at, absl::Span<uint8_t> to) {
                           const auto rows = static_cast<int64_t>(to.size()) / row_bytes;
                           const int64_t begin = at / row_bytes;
                           return Fill(*weight, type, begin, begin + rows, to.data());
                         }});
  return out;
}

}  // namespace

const Target kDenseTarget = {.name = "dense", .encode = Encode};

}  // namespace awqd::tools
