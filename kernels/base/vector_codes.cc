// Vector codes on the host: a table of functions.
#include "kernels/base/vector_codes.h"

#include <cstring>

#include "kernels/base/codebooks.h"
#include "kernels/base/half.h"

namespace awqd {
namespace {

template <VectorCode kCode>
void Decode(const uint8_t* block, DecodedBlock* out) {
  static constexpr auto kBook = MakeCodebook<kCode>();
  const float d = HalfToFloat(BlockScale<kCode>(block));
  for (int v = 0; v < kVectorBlock / 8; ++v) {
    const EightElements eight = DecodeEight<kCode>(kBook, block, v);
    std::memcpy(out->codes + 8 * v, &eight.low, 4);  // the machine is little endian too
    std::memcpy(out->codes + 8 * v + 4, &eight.high, 4);
  }
  for (int i = 0; i < kVectorBlock / kVectorGroup; ++i) {
    out->scales[i] = ScaleOfSixteen<kCode>(block, d, i);
  }
}

template <VectorCode kCode>
constexpr VectorCodeInfo Info(absl::string_view name) {
  return {kCode, name, BlockScale<kCode>, Decode<kCode>};
}

constexpr VectorCodeInfo kInfos[] = {
    Info<VectorCode::kIq2Xxs>("iq2_xxs"), Info<VectorCode::kIq2Xs>("iq2_xs"),
    Info<VectorCode::kIq2S>("iq2_s"),     Info<VectorCode::kIq3Xxs>("iq3_xxs"),
    Info<VectorCode::kIq3S>("iq3_s"),     Info<VectorCode::kIq1S>("iq1_s"),
    Info<VectorCode::kIq1M>("iq1_m")};

}  // namespace

absl::Span<const VectorCodeInfo> VectorCodes() { return kInfos; }

const VectorCodeInfo& InfoOf(VectorCode code) {
  static constexpr VectorCodeInfo kNone;
  for (const VectorCodeInfo& info : kInfos) {
    if (info.code == code) return info;
  }
  return kNone;
}

}  // namespace awqd
