// FasterTransformer's order: pinned words, both ways and back, and every refusal.
#include "kernels/formats/fastertransformer.h"

#include <random>
#include <string>
#include <vector>

#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

Linear MakeLinear(int bits, int64_t k = 64, int64_t n = 64, int64_t group = 0) {
  Linear out = {.format = &kFasterTransformerFormat};
  out.Set("bits", bits);
  out.Add("weight", "I8", {k, n * bits / 8});
  if (group == 0) {
    out.Add("weight_scale", "F16", {n});
  } else {
    out.Set("group_size", group);
    out.Add("weight_scale", "F16", {k / group, n});
  }
  std::mt19937 random(static_cast<uint32_t>(bits * 1000 + k + n + group));
  for (uint8_t& byte : out.tensors["weight"].bytes) byte = static_cast<uint8_t>(random());
  for (int64_t i = 0; i < n * std::max<int64_t>(1, group == 0 ? 1 : k / group); ++i) {
    out.Put<uint16_t>("weight_scale", i, 0x2000 + random() % 0x800);
  }
  return out;
}

// For 8 bits the first word is rows 0, 8, 1, 9 of column 0; the words of columns 0 and 1 alternate
// every 64 rows. For 4 bits: rows 0, 8, 16, 24, 1, 9, 17, 25, and 4 columns.
TEST(FasterTransformerFormat, PinnedBytes) {
  Linear linear = MakeLinear(8);
  linear.Reshape("weight", {64, 64});
  for (int i = 0; i < 4; ++i) linear.Put<uint8_t>("weight", i, 10 + i);
  linear.Put<uint8_t>("weight", 64, 20);   // column 1, row 0
  linear.Put<uint8_t>("weight", 128, 30);  // column 2, row 0
  auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->Code(0, 0), 10);
  EXPECT_EQ(weight->Code(8, 0), 11);
  EXPECT_EQ(weight->Code(1, 0), 12);
  EXPECT_EQ(weight->Code(9, 0), 13);
  EXPECT_EQ(weight->Code(0, 1), 20);
  EXPECT_EQ(weight->Code(0, 2), 30);
  linear = MakeLinear(4);
  linear.Reshape("weight", {64, 32});
  linear.Put<uint32_t>("weight", 0, 0x87654321);
  linear.Put<uint8_t>("weight", 3 * 32, 0x0f);  // column 3, row 0
  weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  const int rows[] = {0, 8, 16, 24, 1, 9, 17, 25};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(weight->Code(rows[i], 0), i + 1);
  EXPECT_EQ(weight->Code(0, 3), 15);
}

TEST(FasterTransformerFormat, ExportOfImportIsTheSame) {
  for (const int bits : {8, 4}) {
    for (const int64_t group : {0, 64}) {
      const Linear linear = MakeLinear(bits, 192, 128, group);
      const auto weight = linear.Decode();
      ASSERT_TRUE(weight.ok()) << weight.status();
      ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
      EXPECT_EQ(weight->scheme, Symmetric(bits, group));
      const auto back = ToFasterTransformer(*weight);
      ASSERT_TRUE(back.ok()) << back.status();
      EXPECT_EQ(back->weight, linear.tensors.at("weight").bytes);
      EXPECT_EQ(back->scales, linear.tensors.at("weight_scale").bytes);
      EXPECT_EQ(back->k, 192);
      EXPECT_EQ(back->n, 128);
      EXPECT_EQ(back->bits, bits);
      EXPECT_EQ(back->group_rows, group == 0 ? 192 : group);
    }
  }
}

TEST(FasterTransformerFormat, ImportOfExportIsTheSame) {
  for (const int bits : {8, 4}) {
    for (const DType scale : {DType::kFp16, DType::kBf16}) {
      HostWeight weight = *MakeLinear(bits, 128, 64, 32).Decode();
      weight.scheme = Symmetric(bits, 32, scale);
      weight.bias.assign(64, 0.5f);
      std::mt19937 random(5);
      for (uint8_t& byte : weight.codes) byte = static_cast<uint8_t>(random());
      const auto out = ToFasterTransformer(weight);
      ASSERT_TRUE(out.ok()) << out.status();
      Linear linear = MakeLinear(bits, 128, 64, 32);
      linear.tensors["weight"].bytes = out->weight;
      linear.tensors["weight_scale"].bytes = out->scales;
      linear.tensors["weight_scale"].dtype = out->scale_dtype == DType::kFp16 ? "F16" : "BF16";
      const auto back = linear.Decode();
      ASSERT_TRUE(back.ok()) << back.status();
      EXPECT_EQ(back->codes, weight.codes);
      EXPECT_EQ(back->scales, weight.scales);
      EXPECT_EQ(back->scheme, weight.scheme);
      EXPECT_EQ(out->bias, weight.bias);
    }
  }
}

TEST(FasterTransformerFormat, ExportRefusesWhatItCannotHold) {
  const HostWeight good = *MakeLinear(8).Decode();
  const auto refused = [&](const std::string& says, const std::function<void(HostWeight*)>& spoil) {
    HostWeight weight = good;
    spoil(&weight);
    const absl::Status status = ToFasterTransformer(weight).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  };
  refused("scheme: got w8cm5", [](HostWeight* w) { w->scheme.zero = 5; });
  refused("scheme: got w8cs+int8", [](HostWeight* w) {
    w->scheme.scale_dtype = DType::kInt8;
    w->scales.resize(64);
  });
  refused("scheme: got w8g48s", [](HostWeight* w) {
    w->scheme.block_rows = 48;  // the last group is short
    w->scales.resize(2 * 2 * 64);
  });
  refused("order: got one", [](HostWeight* w) {
    for (int32_t i = 0; i < 64; ++i) w->order.push_back(63 - i);
  });
  refused("factor: got one", [](HostWeight* w) { w->factor.assign(64, 1.0f); });
  refused("K = 32", [](HostWeight* w) {
    w->k = 32;
    w->codes.resize(32 * 64);
  });
  refused("scales: got", [](HostWeight* w) { w->scales.pop_back(); });
}

TEST(FasterTransformerFormat, ReadsSettings) {
  Setting config;
  config.members = {{"quant_method", Setting::String("fastertransformer")},
                    {"bits", Setting::Literal(int64_t{8})}};
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kFasterTransformerFormat);
  config.members.erase("bits");
  EXPECT_THAT(std::string(FindFormat(config).status().message()), HasSubstr("bits: got nothing"));
}

class FasterTransformerRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(FasterTransformerRefusal, NamesThePart) {
  ExpectRefused(MakeLinear(8, 128, 64, 32), GetParam());
}

std::vector<Refusal> Refusals() {
  return {
      {"WeightMissing", Without("weight"), {"\"weight\": got nothing"}},
      {"ScaleMissing", Without("weight_scale"), {"\"weight_scale\": got nothing"}},
      {"WeightDtype", WithDtype("weight", "F16"), {"\"weight\": got dtype F16"}},
      {"WeightRank", WithShape("weight", {128, 64, 1}), {"expected rank 2"}},
      {"WeightShort", Short("weight"), {"\"weight\": got 8191 bytes, expected 8192"}},
      {"RowsOfNoTile", WithShape("weight", {96, 64}), {"\"weight\": got K = 96", "64"}},
      {"ColumnsOfNoTile", WithShape("weight", {128, 96}), {"\"weight\": got N = 96", "64"}},
      {"FourBitsOfOtherScales", With("bits", 4), {"\"weight_scale\": got shape [4, 64]", "128"}},
      {"ScaleDtype", WithDtype("weight_scale", "F32"), {"got dtype F32, expected F16 or BF16"}},
      {"ScaleColumns", WithShape("weight_scale", {4, 63}), {"got shape [4, 63], expected [64]"}},
      {"ScaleRank", WithShape("weight_scale", {}), {"\"weight_scale\": got shape []"}},
      {"ScaleGroups", WithShape("weight_scale", {3, 64}), {"got 3 groups, expected 4"}},
      {"ScaleShort", Short("weight_scale"), {"\"weight_scale\": got 511 bytes"}},
      {"ScaleIsNan",
       [](Linear* l) { l->Put<uint16_t>("weight_scale", 200, 0x7c01); },
       {"\"weight_scale\": got NaN at element 200"}},
      {"BlockLargerThanTheMatrix", With("group_size", 256), {"group_size: got 256"}},
      {"GroupDoesNotDivide", With("group_size", 48), {"group_size: got 48", "divisor of K = 128"}},
      {"SixBits", With("bits", 6), {"bits: got 6, expected 8 or 4"}},
      {"NoBits", [](Linear* l) { l->settings.members.erase("bits"); }, {"bits: got nothing"}},
      {"BiasShape", [](Linear* l) { l->Add("bias", "F16", {1}); }, {"\"bias\": got shape [1]"}},
  };
}

INSTANTIATE_TEST_SUITE_P(All, FasterTransformerRefusal, ::testing::ValuesIn(Refusals()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace awqd
