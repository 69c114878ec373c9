// Trellis codes on the host: tables of entries, and whole tiles.
#include "kernels/base/trellis.h"

#include <cstring>
#include <vector>

#include "kernels/base/half.h"

namespace awqd {
namespace {

constexpr uint32_t kStates = 1u << 16;

std::vector<float> Entries(TrellisCode code) {
  std::vector<float> out(kStates);
  for (uint32_t state = 0; state < kStates; ++state) {
    const float sum = static_cast<float>(TrellisSum(code, state)) * TrellisUnit(code);
    out[state] = HalfToFloat(FloatToHalf(sum));
  }
  return out;
}

template <TrellisCode kCode>
const float* EntriesOnce() {
  static const std::vector<float> entries = Entries(kCode);
  return entries.data();
}

}  // namespace

absl::string_view Suffix(TrellisCode code) {
  return code == TrellisCode::kMcg ? "mcg" : code == TrellisCode::kMul1 ? "mul1" : "";
}

const float* TrellisEntries(TrellisCode code) {
  if (code == TrellisCode::kMcg) return EntriesOnce<TrellisCode::kMcg>();
  if (code == TrellisCode::kMul1) return EntriesOnce<TrellisCode::kMul1>();
  return EntriesOnce<TrellisCode::k3Inst>();
}

void DecodeTile(TrellisCode code, int bits, const uint8_t* tile, int64_t row_stride,
                int64_t column_stride, float* out) {
  const float* const entries = TrellisEntries(code);
  const auto word = [tile](int index) {
    uint32_t bits_of_word;
    std::memcpy(&bits_of_word, tile + 4 * index, 4);  // the machine is little endian too
    return bits_of_word;
  };
  uint64_t buffer = word(8 * bits - 1);  // the ring: the tile's end comes before its begin
  int left = 0, next = 0;
  for (int i = 0; i < 256; ++i) {
    if (left < bits) {
      buffer = buffer << 32 | word(next++);
      left += 32;
    }
    left -= bits;
    out[TrellisRow(i) * row_stride + TrellisColumn(i) * column_stride] =
        entries[buffer >> left & 0xffff];
  }
}

}  // namespace awqd
