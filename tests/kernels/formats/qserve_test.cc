// QServe's order of codes and scales, its zeros, and every refusal.
#include <random>
#include <string>
#include <vector>

#include "kernels/exact.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

// K = 64 in groups of 32, N = 32. Codes 0, zeros 0, s2 1, s1 1.
Linear MakeGroups() {
  Linear out = {.format = &kQServeFormat};
  out.Set("bits", 4);
  out.Set("group_size", 32);
  out.Add("qweight", "I8", {32, 32});
  out.Add("s1_scales", "F16", {32});
  out.Add("s2_scales", "I8", {2, 32});
  out.Add("s2_zeros", "I8", {2, 32});
  for (int i = 0; i < 32; ++i) out.Put<uint16_t>("s1_scales", i, 0x3c00);
  for (int i = 0; i < 64; ++i) out.Put<int8_t>("s2_scales", i, 1);
  return out;
}

Linear MakeChannels() {
  Linear out = MakeGroups();
  out.tensors.erase("s2_scales");
  out.tensors.erase("s2_zeros");
  out.Add("s1_szeros", "F16", {32});
  out.Set("group_size", -1);
  return out;
}

// The byte of W[row, col], and the shift of its half.
struct Where {
  int64_t byte;
  int shift;
};
Where At(int64_t k, int64_t row, int64_t col) {
  const int64_t tile = col / 32 * (k / 32) + row / 32, r = row % 32, c = col % 32;
  return {512 * tile + 64 * (c % 8) + 16 * (r % 16 / 4) + 8 * (r / 16) + 4 * (c % 16 / 8) + r % 4,
          c < 16 ? 0 : 4};
}

void PutCode(Linear* linear, int64_t k, int64_t row, int64_t col, int code) {
  const Where at = At(k, row, col);
  uint8_t& byte = linear->tensors["qweight"].bytes[at.byte];
  byte = static_cast<uint8_t>((byte & ~(15 << at.shift)) | code << at.shift);
}

int64_t PlaceOf(int64_t col) { return col / 32 * 32 + col % 8 * 4 + col % 32 / 8; }

TEST(QServeFormat, PinnedBytes) {
  Linear linear = MakeGroups();
  linear.Put<uint8_t>("qweight", 0, 0x21);          // row 0 of columns 0 and 16
  linear.Put<uint8_t>("qweight", 4, 0x43);          // of columns 8 and 24
  linear.Put<uint8_t>("qweight", 8 + 1, 0x05);      // row 17 of column 0
  linear.Put<uint8_t>("qweight", 16, 0x06);         // row 4
  linear.Put<uint8_t>("qweight", 512 + 64, 0x70);   // row 32 of column 17
  linear.Put<int8_t>("s2_scales", 32 + 4 + 2, 5);   // group 1 of column 17
  linear.Put<int8_t>("s2_zeros", 32 + 4 + 2, -15);  // z = 3 * 5
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w4g32z+int8*c");
  EXPECT_EQ(weight->activations.how, ActivationQuantization::kPerToken);
  EXPECT_EQ(weight->Code(0, 0), 1);
  EXPECT_EQ(weight->Code(0, 16), 2);
  EXPECT_EQ(weight->Code(0, 8), 3);
  EXPECT_EQ(weight->Code(0, 24), 4);
  EXPECT_EQ(weight->Code(17, 0), 5);
  EXPECT_EQ(weight->Code(4, 0), 6);
  EXPECT_EQ(weight->Code(32, 17), 7);
  EXPECT_EQ(weight->Zero(1, 17), 3);
  EXPECT_EQ(WeightValue(*weight, 32, 17), (7 - 3) * 5);
  EXPECT_EQ(WeightValue(*weight, 33, 17), -15);
}

TEST(QServeFormat, EveryCodeOfSomeShapes) {
  std::mt19937 random(3);
  for (const auto& [k, n] : {std::pair{32, 32}, {96, 64}, {64, 96}}) {
    Linear linear = MakeChannels();
    linear.Reshape("qweight", {n, k / 2});
    linear.Reshape("s1_scales", {n});
    linear.Reshape("s1_szeros", {n});
    std::vector<int> codes;
    for (int i = 0; i < k * n; ++i) {
      codes.push_back(static_cast<int>(random() % 16));
      PutCode(&linear, k, i / n, i % n, codes.back());
    }
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(ToString(weight->scheme), "w4co");
    int wrong = 0;
    for (int i = 0; i < k * n; ++i) wrong += weight->Code(i / n, i % n) != codes[i];
    EXPECT_EQ(wrong, 0) << k << " " << n;
  }
}

// For every scale and zero whose integers fit INT8: the kernel's result, computed byte by byte.
TEST(QServeFormat, EveryScaleAndZeroIsWhatTheKernelMakes) {
  for (int scale = 0; scale <= 17; ++scale) {
    for (int zero = 0; zero < 256; ++zero) {
      Linear linear = MakeGroups();
      int allowed = 0;
      for (int code = 0; code < 16; ++code) {
        if (code * scale - zero < -128 || code * scale - zero > 127) continue;
        allowed = code;
        for (int row = 0; row < 32; ++row) PutCode(&linear, 64, row, 9, code);
      }
      linear.Put<int8_t>("s2_scales", PlaceOf(9), static_cast<int8_t>(scale));
      linear.Put<uint8_t>("s2_zeros", PlaceOf(9), static_cast<uint8_t>(-zero));
      const auto weight = linear.Decode();
      if (allowed * scale - zero < -128) {
        EXPECT_EQ(weight.status().code(), absl::StatusCode::kInvalidArgument);
        continue;
      }
      ASSERT_TRUE(weight.ok()) << weight.status();
      const auto byte = static_cast<uint8_t>(allowed * scale + static_cast<uint8_t>(-zero));
      EXPECT_EQ(WeightValue(*weight, 0, 9), static_cast<int8_t>(byte)) << scale << " " << zero;
      const bool multiple = scale == 0 ? zero == 0 : zero % scale == 0 && zero / scale < 16;
      EXPECT_EQ(ToString(weight->scheme), multiple ? "w4g32z+int8*c" : "w4g32o+int8*c");
    }
  }
}

TEST(QServeFormat, TensorsTellTheGroupsWhereNothingIsSaid) {
  for (Linear linear : {MakeGroups(), MakeChannels()}) {
    linear.settings.members.clear();
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(weight->groups(), linear.tensors.count("s2_scales") == 1 ? 2 : 1);
  }
}

TEST(QServeFormat, ReadsSettings) {
  for (const std::string method : {"qserve", "QoQ"}) {
    for (const std::string bits : {"bits", "w_bit", "wbits"}) {
      Setting config;
      config.members["quant_method"] = Setting::String(method);
      EXPECT_THAT(std::string(FindFormat(config).status().message()),
                  ::testing::HasSubstr("bits (or w_bit, or wbits): got nothing, expected 4"));
      config.members[bits] = Setting::Literal(int64_t{4});
      auto found = FindFormat(config);
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ(found->format, &kQServeFormat);
      EXPECT_EQ(found->config.rules.at(0).settings.members.count("group_size"), 0u);
      config.members["group_size"] = Setting::Literal(int64_t{128});
      found = FindFormat(config);
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ(found->config.rules.at(0).settings.members.at("group_size"),
                Setting::Literal(int64_t{128}));
      config.members[bits] = Setting::Literal(int64_t{8});
      const absl::Status wide = FindFormat(config).status();
      EXPECT_EQ(wide.code(), absl::StatusCode::kUnimplemented);
      EXPECT_THAT(std::string(wide.message()),
                  ::testing::HasSubstr("qserve: " + bits + ": got 8, expected 4 (W4A8)"));
    }
  }
}

TEST(QServeFormat, RefusalsPerGroup) {
  const auto scale = [](int8_t value) {
    return [=](Linear* l) { l->Put<int8_t>("s2_scales", 32 + PlaceOf(11), value); };
  };
  const auto integers = [](int code, int8_t zero) {
    return [=](Linear* l) {
      PutCode(l, 64, 40, 11, code);
      l->Put<int8_t>("s2_scales", 32 + PlaceOf(11), 17);
      l->Put<int8_t>("s2_zeros", 32 + PlaceOf(11), zero);
    };
  };
  const Refusal refusals[] = {
      {"bits", With("bits", 8), {"bits: got 8, expected 4"}},
      {"no codes", Without("qweight"), {"\"qweight\": got nothing, expected I8 [N, K/2]"}},
      {"no s1", Without("s1_scales"), {"tensor \"s1_scales\": got nothing"}},
      {"no s2", Without("s2_scales"), {"tensor \"s2_scales\": got nothing"}},
      {"no zeros", Without("s2_zeros"), {"tensor \"s2_zeros\": got nothing"}},
      {"type of codes", WithDtype("qweight", "U8"), {"\"qweight\": got dtype U8, expected I8"}},
      {"type of s1", WithDtype("s1_scales", "I8"), {"\"s1_scales\": got dtype I8"}},
      {"type of s2", WithDtype("s2_scales", "U8"), {"\"s2_scales\": got dtype U8, expected I8"}},
      {"type of zeros", WithDtype("s2_zeros", "F16"), {"\"s2_zeros\": got dtype F16"}},
      {"rank", WithShape("qweight", {1024}), {"\"qweight\": got shape [1024], expected rank 2"}},
      {"rank of s1", WithShape("s1_scales", {32, 1}), {"\"s1_scales\": got shape [32, 1]"}},
      {"nothing", WithShape("qweight", {0, 32}), {"\"qweight\": got shape [0, 32]", "at least 1"}},
      {"missing bytes", Short("qweight"), {"\"qweight\": got 1023 bytes, expected 1024"}},
      {"missing scales", Short("s2_scales"), {"\"s2_scales\": got 63 bytes, expected 64"}},
      {"missing zeros", Short("s2_zeros"), {"\"s2_zeros\": got 63 bytes, expected 64"}},
      {"N", WithShape("qweight", {40, 32}), {"\"qweight\": got K = 64, N = 40", "of 32"}},
      {"K", WithShape("qweight", {32, 24}), {"\"qweight\": got K = 48, N = 32", "of 32"}},
      {"columns of s1", WithShape("s1_scales", {64}), {"\"s1_scales\": got shape [64]", "[32]"}},
      {"columns", WithShape("s2_scales", {2, 64}), {"\"s2_scales\": got shape [2, 64]", "[2, 32]"}},
      {"groups", WithShape("s2_zeros", {1, 32}), {"\"s2_zeros\": got shape [1, 32]", "[2, 32]"}},
      {"group size", With("group_size", 64), {"\"s2_scales\": got 2 groups, expected 1"}},
      {"uneven groups", With("group_size", 48), {"group_size: got 48", "a divisor of K = 64"}},
      {"group of 0", With("group_size", 0), {"group_size: got 0"}},
      {"channels",
       With("group_size", -1),
       {"\"s2_scales\": got a tensor, expected none, as group"}},
      {"both",
       [](Linear* l) { l->Add("s1_szeros", "F16", {32}); },
       {"\"s1_szeros\": got a tensor, expected none beside"}},
      {"NaN", [](Linear* l) { l->Put<uint16_t>("s1_scales", 3, 0x7e00); }, {"NaN at element 3"}},
      {"infinity", [](Linear* l) { l->Put<uint16_t>("s1_scales", 3, 0x7c00); }, {"inf", "finite"}},
      {"large scale",
       scale(18),
       {"\"s2_scales\": got 18 in group 1 of column 11, expected 0 to 17"}},
      {"negative scale", scale(-1), {"\"s2_scales\": got -1 in group 1 of column 11"}},
      {"integers above INT8",
       integers(8, -1),
       {"\"s2_zeros\": got integers from -1 to 135 in group 1 of column 11", "-128 to 127"}},
      {"integers below INT8",
       integers(8, 127),
       {"\"s2_zeros\": got integers from -129 to 7 in group 1 of column 11"}},
      {"bias", [](Linear* l) { l->Add("bias", "F16", {3}); }, {"tensor \"bias\": got shape [3]"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeGroups(), refusal);
  }
}

TEST(QServeFormat, RefusalsPerChannel) {
  const Refusal refusals[] = {
      {"no zeros",
       Without("s1_szeros"),
       {"\"s1_szeros\": got nothing, expected F16 or BF16 [N], or s2_scales and s2_zeros"}},
      {"groups", With("group_size", 128), {"\"s2_scales\": got nothing", "as group_size is 128"}},
      {"type of zeros", WithDtype("s1_szeros", "I8"), {"\"s1_szeros\": got dtype I8"}},
      {"columns of zeros", WithShape("s1_szeros", {2}), {"\"s1_szeros\": got shape [2]", "[32]"}},
      {"missing bytes", Short("s1_szeros"), {"\"s1_szeros\": got 63 bytes"}},
      {"NaN", [](Linear* l) { l->Put<uint16_t>("s1_szeros", 4, 0x7e00); }, {"NaN at element 4"}},
      {"NaN scale",
       [](Linear* l) { l->Put<uint16_t>("s1_scales", 4, 0xfe00); },
       {"\"s1_scales\": got NaN at element 4"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeChannels(), refusal);
  }
}

}  // namespace
}  // namespace awqd
