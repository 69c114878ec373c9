// Marlin's order of codes and scales in both formats that have it, and every refusal.
#include <random>
#include <string>
#include <vector>

#include "kernels/base/half.h"
#include "kernels/exact.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

// K = 64 in groups of 32, N = 64. Codes 0, scales 1.
Linear MakeGptq() {
  Linear out = {.format = &kGptqMarlinFormat};
  out.Set("bits", 4);
  out.Set("group_size", 32);
  out.Add("B", "I32", {4, 128});
  out.Add("s", "F16", {2, 64});
  for (int i = 0; i < 128; ++i) out.Put<uint16_t>("s", i, 0x3c00);
  return out;
}

Linear MakeAwq() {
  Linear out = MakeGptq();
  out.format = &kAwqMarlinFormat;
  out.tensors = {{"qweight", out.tensors["B"]}, {"scales", out.tensors["s"]}};
  return out;
}

TEST(MarlinFormats, PinnedWord) {
  Linear linear = MakeGptq();
  // Lane 9: columns 2 and 10 of 16, rows 2, 3, 10 and 11. The third 16 columns, the second 16 rows.
  linear.Put<uint32_t>("B", 128 + 9 * 4 + 2, 0x76543210);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w4g32s");
  const int rows[] = {2, 10, 2, 10, 3, 11, 3, 11}, cols[] = {2, 2, 10, 10, 2, 2, 10, 10};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(weight->Code(16 + rows[i], 32 + cols[i]), i);
  EXPECT_EQ(WeightValue(*weight, 16 + 11, 32 + 10), 7 - 8);
}

TEST(MarlinFormats, EveryCodeInBoth) {
  std::mt19937 random(6);
  for (const auto& [k, n] : {std::pair{16, 64}, {48, 128}, {64, 192}}) {
    for (Linear linear : {MakeGptq(), MakeAwq()}) {
      const bool gptq = linear.format == &kGptqMarlinFormat;
      const std::string name = gptq ? "B" : "qweight";
      linear.Set("group_size", -1);
      linear.Reshape(name, {k / 16, 2 * n});
      linear.Reshape(gptq ? "s" : "scales", {1, n});
      std::vector<int> codes;
      for (int i = 0; i < k * n; ++i) {
        const int row = i / n % 16, col = i % n;
        codes.push_back(static_cast<int>(random() % 16));
        const int word =
            i / n / 16 * 2 * n + col / 64 * 128 + (col % 8 * 4 + row % 8 / 2) * 4 + col % 64 / 16;
        const int nibble = row % 2 * 4 + col % 16 / 8 * 2 + row / 8;
        uint8_t& byte = linear.tensors[name].bytes[4 * word + nibble / 2];
        byte = static_cast<uint8_t>(byte | codes.back() << (nibble % 2 * 4));
      }
      const auto weight = linear.Decode();
      ASSERT_TRUE(weight.ok()) << weight.status();
      EXPECT_EQ(ToString(weight->scheme), "w4cs");
      int wrong = 0;
      for (int i = 0; i < k * n; ++i) wrong += weight->Code(i / n, i % n) != codes[i];
      EXPECT_EQ(wrong, 0) << k << " " << n;
    }
  }
}

TEST(MarlinFormats, ScalesOfGroupsAndOfOne) {
  const int first_of_groups[] = {0, 8, 16, 24, 32, 40, 48, 56, 1, 9};
  const int first_of_one[] = {0, 1, 8, 9, 16, 17, 24, 25, 2, 3};
  for (const bool one : {false, true}) {
    Linear linear = MakeGptq();
    linear.Set("group_size", one ? -1 : 32);
    linear.Reshape("s", {one ? 1 : 2, 64});
    const int last = one ? 0 : 64;  // where the last group begins
    for (int i = 0; i < 64; ++i) {
      linear.Put<uint16_t>("s", last + i, FloatToHalf(static_cast<float>(i)));
    }
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    for (int i = 0; i < 10; ++i) {
      const int col = one ? first_of_one[i] : first_of_groups[i];
      EXPECT_EQ(weight->Scale(one ? 0 : 1, col), static_cast<float>(i));
      // The second half of 64 columns is permuted separately only if there is one group.
      if (one) {
        EXPECT_EQ(weight->Scale(0, 32 + col), static_cast<float>(32 + i));
      }
    }
    EXPECT_EQ(weight->Scale(one ? 0 : 1, 63), 63.0f);
  }
}

TEST(MarlinFormats, GptqSettings) {
  struct Case {
    std::vector<std::pair<std::string, Setting>> settings;
    std::string says;  // empty if they are accepted
  };
  const Setting yes = Setting::Literal(true), no = Setting::Literal(false);
  const Setting marlin = Setting::String("marlin"), gptq = Setting::String("gptq");
  for (const Case& c : std::vector<Case>{
           {{{"checkpoint_format", marlin}}, ""},
           {{{"format", marlin}, {"sym", yes}, {"desc_act", no}}, ""},
           {{{"is_marlin_format", yes}}, ""},
           {{{"quant_method", marlin}}, ""},
           {{{"quant_method", marlin}, {"checkpoint_format", marlin}}, ""},
           {{{"quant_method", marlin}, {"checkpoint_format", gptq}},
            "checkpoint_format: got \"gptq\", expected \"marlin\""},
           {{{"is_marlin_format", yes}, {"checkpoint_format", gptq}},
            "checkpoint_format: got \"gptq\", expected \"marlin\", as is_marlin_format is true"},
           {{{"checkpoint_format", marlin}, {"format", gptq}}, "format: got \"gptq\""},
           {{{"checkpoint_format", marlin}, {"bits", Setting::Literal(int64_t{8})}},
            "bits: got 8, expected 4"},
           {{{"checkpoint_format", marlin}, {"sym", no}}, "sym: got false, expected true"},
           {{{"checkpoint_format", marlin}, {"desc_act", yes}},
            "desc_act: got true, expected false"},
           {{{"checkpoint_format", marlin}, {"group_size", {Setting::Kind::kNull}}},
            "group_size: got nothing"}}) {
    Setting config;
    config.members = {{"quant_method", gptq},
                      {"bits", Setting::Literal(int64_t{4})},
                      {"group_size", Setting::Literal(int64_t{128})}};
    for (const auto& [name, value] : c.settings) config.members[name] = value;
    const auto found = FindFormat(config);
    SCOPED_TRACE(c.says);
    if (c.says.empty()) {
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ(found->format, &kGptqMarlinFormat);
      continue;
    }
    EXPECT_EQ(found.status().code(), absl::StatusCode::kInvalidArgument) << found.status();
    EXPECT_THAT(std::string(found.status().message()), ::testing::HasSubstr(c.says));
  }
}

TEST(MarlinFormats, Refusals) {
  for (const Linear& good : {MakeGptq(), MakeAwq()}) {
    const bool gptq = good.format == &kGptqMarlinFormat;
    const std::string codes = gptq ? "B" : "qweight", scales = gptq ? "s" : "scales";
    const std::string of_codes = "tensor \"" + codes + "\": got ";
    const std::string of_scales = "tensor \"" + scales + "\": got ";
    std::vector<Refusal> refusals = {
        {"bits", With("bits", 8), {"bits: got 8, expected 4"}},
        {"no codes", Without(codes), {of_codes + "nothing, expected I32 [K/16, 2 N]"}},
        {"no scales", Without(scales), {of_scales + "nothing, expected F16 or BF16"}},
        {"type of codes", WithDtype(codes, "F32"), {of_codes + "dtype F32, expected I32"}},
        {"type of scales", WithDtype(scales, "F32"), {of_scales + "dtype F32"}},
        {"rank", WithShape(codes, {512}), {of_codes + "shape [512], expected rank 2"}},
        {"nothing", WithShape(scales, {0, 64}), {of_scales + "shape [0, 64]", "at least 1"}},
        {"missing codes", Short(codes), {of_codes + "2047 bytes, expected 2048"}},
        {"missing scales", Short(scales), {of_scales + "255 bytes, expected 256"}},
        {"N", WithShape(scales, {2, 96}), {of_scales + "N = 96, expected a multiple of 64"}},
        {"columns",
         WithShape(scales, {2, 128}),
         {of_codes + "shape [4, 128], expected [4, 256] ([K/16, 2 N] for N = 128 of tensor"}},
        {"K",
         WithShape(codes, {5, 128}),
         {"group_size: got 32, expected -1 or a divisor of K = 80"}},
        {"groups", With("group_size", -1), {of_scales + "2 groups, expected 1"}},
        {"group size", With("group_size", 16), {of_scales + "2 groups, expected 4"}},
        {"NaN",
         [=](Linear* l) { l->Put<uint16_t>(scales, 7, 0x7e00); },
         {of_scales + "NaN at element 7"}},
        {"bias", [](Linear* l) { l->Add("bias", "F16", {3}); }, {"tensor \"bias\": got shape [3]"}},
    };
    if (gptq) {
      refusals.push_back({"sym", With("sym", Setting::Literal(false)), {"sym: got false"}});
      refusals.push_back(
          {"order", With("desc_act", Setting::Literal(true)), {"desc_act: got true"}});
    } else {
      refusals.push_back({"zero_point",
                          With("zero_point", Setting::Literal(true)),
                          {"zero_point: got true, expected false"}});
      refusals.push_back({"zeros",
                          [](Linear* l) {
                            l->Add("qzeros", "I32", {2, 8});
                          },
                          {"tensor \"qzeros\": got a tensor, expected none"}});
    }
    for (const Refusal& refusal : refusals) {
      SCOPED_TRACE(codes + " " + refusal.name);
      ExpectRefused(good, refusal);
    }
  }
}

}  // namespace
}  // namespace awqd
