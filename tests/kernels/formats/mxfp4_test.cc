// "mxfp4": its tensors, and every refusal.
#include <string>
#include <vector>

#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

// N = 3, K = 64: the code of (n, k) is (n + k) % 16.
Linear MakeLinear() {
  Linear out = {.format = &kMxfp4Format};
  out.Add("blocks", "U8", {3, 2, 16});
  out.Add("scales", "U8", {3, 2});
  for (int n = 0; n < 3; ++n) {
    for (int k = 0; k < 64; k += 2) {
      out.Put<uint8_t>("blocks", n * 32 + k / 2,
                       static_cast<uint8_t>((n + k) % 16 | (n + k + 1) % 16 << 4));
    }
  }
  for (int i = 0; i < 6; ++i) out.Put<uint8_t>("scales", i, static_cast<uint8_t>(125 + i));
  return out;
}

TEST(Mxfp4Format, EveryElement) {
  const auto weight = MakeLinear().Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(weight->k, 64);
  EXPECT_EQ(weight->n, 3);
  EXPECT_EQ(ToString(weight->scheme), "e2m1g32+e8m0");
  constexpr float kValues[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  for (int k = 0; k < 64; ++k) {
    for (int n = 0; n < 3; ++n) {
      const int code = (n + k) % 16;
      const float value = (code < 8 ? 1.0f : -1.0f) * kValues[code % 8];
      EXPECT_EQ(WeightValue(*weight, k, n), std::ldexp(value, n * 2 + k / 32 - 2));
    }
  }
}

TEST(Mxfp4Format, Refusals) {
  const std::vector<Refusal> refusals = {
      {"no blocks", Without("blocks"), {"\"blocks\": got nothing, expected U8 [N, K/32, 16]"}},
      {"no scales", Without("scales"), {"\"scales\": got nothing"}},
      {"dtype", WithDtype("blocks", "I8"), {"\"blocks\": got dtype I8, expected U8"}},
      {"rank", WithShape("blocks", {3, 32}), {"\"blocks\": got shape [3, 32], expected rank 3"}},
      {"block", WithShape("blocks", {3, 4, 8}), {"got shape [3, 4, 8], expected [3, 4, 16]"}},
      {"short", Short("blocks"), {"\"blocks\": got 95 bytes, expected 96"}},
      {"scales", WithShape("scales", {2, 3}), {"got shape [2, 3], expected [3, 2]"}},
      {"scale dtype", WithDtype("scales", "F8_E4M3"), {"\"scales\": got dtype F8_E4M3"}},
      {"NaN", [](Linear* l) { l->Put<uint8_t>("scales", 5, 255); }, {"got NaN at element 5"}},
      {"bias", [](Linear* l) { l->Add("bias", "F16", {2}); }, {"\"bias\": got shape [2]"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeLinear(), refusal);
  }
}

}  // namespace
}  // namespace awqd
