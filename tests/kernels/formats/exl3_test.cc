// "exl3": its tensors, and every refusal. Values are compared with goldens.
#include "kernels/exact.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

constexpr uint16_t kMinusTwo = 0xc000;  // FP16

// K = 128, N = 256, 3 bits.
Linear MakeExl3() {
  Linear out = {.format = &kExl3Format};
  out.Add("trellis", "I16", {8, 16, 48});
  out.Put<uint16_t>("trellis", 16 * 48 + 1, 0x1234);  // tile (1, 0)
  out.Add("suh", "F16", {128});
  out.Put("suh", 5, kMinusTwo);
  out.Add("svh", "F16", {256});
  out.Put("svh", 200, kMinusTwo);
  return out;
}

void AddNumber(const std::string& name, uint32_t value, Linear* linear) {
  linear->Add(name, "I32", {});
  linear->Put(name, 0, value);
}

TEST(Exl3, TilesAndBothSides) {
  const auto weight = MakeExl3().Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "trellis3*c");
  EXPECT_EQ(weight->k, 128);
  EXPECT_EQ(weight->n, 256);
  EXPECT_EQ(weight->hadamard, (Hadamard{128, kTrellisScale}));
  EXPECT_EQ(weight->factor[5], -2);
  EXPECT_EQ(weight->Outer(200), -2);
  EXPECT_EQ(weight->Block(16, 0)[2], 0x34);
}

TEST(Exl3, SignsOfOlderFiles) {
  Linear linear = MakeExl3();
  linear.tensors.erase("suh");
  linear.tensors.erase("svh");
  linear.Add("su", "I16", {8});
  linear.Put<uint16_t>("su", 1, 1 << 2);
  linear.Add("sv", "I16", {16});
  linear.Put<uint16_t>("sv", 15, 1 << 15);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->factor[17], 1);
  EXPECT_EQ(weight->factor[18], -1);
  EXPECT_EQ(weight->Outer(254), 1);
  EXPECT_EQ(weight->Outer(255), -1);
}

TEST(Exl3, Codebooks) {
  Linear linear = MakeExl3();
  AddNumber("mcg", 0xcbac1fed, &linear);
  EXPECT_EQ(ToString(linear.Decode()->scheme), "trellis3mcg*c");
  linear.tensors.erase("mcg");
  AddNumber("mul1", 0x83dcd12d, &linear);
  EXPECT_EQ(ToString(linear.Decode()->scheme), "trellis3mul1*c");
}

// A request has I32 for I16: two codes each.
TEST(Exl3, TilesOfARequest) {
  Linear linear = MakeExl3();
  linear.tensors["trellis"].dtype = "I32";
  linear.tensors["trellis"].shape = {8, 16, 24};
  EXPECT_EQ(ToString(linear.Decode()->scheme), "trellis3*c");
}

class Exl3Refusals : public ::testing::TestWithParam<Refusal> {};

TEST_P(Exl3Refusals, NameThePart) { ExpectRefused(MakeExl3(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    All, Exl3Refusals,
    ::testing::Values(
        Refusal{"Type", WithDtype("trellis", "F16"), {"\"trellis\": got dtype F16"}},
        Refusal{"Bytes", Short("trellis"), {"\"trellis\": got 12287 bytes, expected 12288"}},
        Refusal{"Rank", WithShape("trellis", {8, 768}), {"\"trellis\": got shape", "rank 3"}},
        Refusal{"Bits", WithShape("trellis", {8, 16, 40}), {"[8, 16, 40]", "1 to 8 bits"}},
        Refusal{"NineBits", WithShape("trellis", {8, 16, 144}), {"[8, 16, 144]", "1 to 8 bits"}},
        Refusal{"InFeatures", WithShape("trellis", {9, 16, 48}), {"K and N multiples of 128"}},
        Refusal{"OutFeatures", WithShape("trellis", {8, 15, 48}), {"K and N multiples of 128"}},
        Refusal{"NoSide", Without("suh"), {"\"suh\": got nothing, expected F16 [128]"}},
        Refusal{"SideType", WithDtype("svh", "BF16"), {"\"svh\": got dtype BF16, expected F16"}},
        Refusal{"SideShape", WithShape("svh", {128}), {"\"svh\": got shape [128]", "[256]"}},
        Refusal{"SideNaN",
                [](Linear* l) { l->Put<uint16_t>("suh", 7, 0x7e00); },
                {"\"suh\": got nan at element 7"}},
        Refusal{"BothSides",
                [](Linear* l) { l->Add("su", "I16", {8}); },
                {"\"su\": got one, expected none beside \"suh\""}},
        Refusal{"SignsShape",
                [](Linear* l) {
                  l->tensors.erase("svh");
                  l->Add("sv", "I16", {8});
                },
                {"\"sv\": got shape [8], expected I16 [16]"}},
        Refusal{"Multiplier",
                [](Linear* l) { AddNumber("mcg", 5, l); },
                {"\"mcg\": got multiplier 0x5, expected 0xcbac1fed"}},
        Refusal{"TwoCodebooks",
                [](Linear* l) {
                  AddNumber("mcg", 0xcbac1fed, l);
                  AddNumber("mul1", 0x83dcd12d, l);
                },
                {"\"mul1\": got one, expected none beside \"mcg\""}}),
    [](const ::testing::TestParamInfo<Refusal>& info) { return info.param.name; });

TEST(Exl3, Settings) {
  Setting config;
  config.members["quant_method"] = Setting::String("exl3");
  config.members["bits"] = Setting::Typed("3.07");  // a mean
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kExl3Format);
}

}  // namespace
}  // namespace awqd
