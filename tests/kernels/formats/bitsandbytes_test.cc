// "bitsandbytes" and "bitsandbytes-int8": their tensors, and every refusal.
#include <string>
#include <vector>

#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

constexpr char kNf4[] = "weight.quant_state.bitsandbytes__nf4";
constexpr char kFp4[] = "weight.quant_state.bitsandbytes__fp4";

void PutText(Linear* l, const std::string& name, const std::string& text) {
  l->Add(name, "U8", {static_cast<int64_t>(text.size())});
  l->tensors[name].bytes.assign(text.begin(), text.end());
}

// N = 3, K = 8 in blocks of 4: code i % 16 of flat element i, table i * 0.5 - 1, scale b + 1.
Linear MakeLinear() {
  Linear out = {.format = &kBitsAndBytesFormat};
  out.Add("weight", "U8", {12, 1});
  out.Add("weight.quant_map", "F32", {16});
  out.Add("weight.absmax", "F32", {6});
  for (int i = 0; i < 12; ++i) {
    out.Put<uint8_t>("weight", i, static_cast<uint8_t>(2 * i % 16 << 4 | (2 * i + 1) % 16));
  }
  for (int i = 0; i < 16; ++i) out.Put<float>("weight.quant_map", i, 0.5f * i - 1);
  for (int i = 0; i < 6; ++i) out.Put<float>("weight.absmax", i, i + 1);
  PutText(&out, kNf4,
          R"({"quant_type": "nf4", "blocksize": 4, "dtype": "float16", "shape": [3, 8]})");
  return out;
}

TEST(BitsAndBytesFormat, EveryElement) {
  const auto weight = MakeLinear().Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "t4g4+fp32");
  for (int n = 0; n < 3; ++n) {
    for (int k = 0; k < 8; ++k) {
      const int flat = n * 8 + k;
      EXPECT_EQ(WeightValue(*weight, k, n), (0.5f * (flat % 16) - 1) * (flat / 4 + 1));
    }
  }
}

// K is no multiple of the block, so blocks span columns and the last one is short.
TEST(BitsAndBytesFormat, BlocksAcrossColumns) {
  struct Case {
    int64_t k;
    int block;
    int group;
  };
  for (const Case& one :
       {Case{12, 8, 4}, Case{6, 4, 2}, Case{10, 64, 2}, Case{80, 64, 16}, Case{48, 32, 16},
        Case{6, 9, 3}, Case{16, 8, 8}, Case{7, 64, 1}, Case{75, 6, 3}}) {
    const int64_t n = 3, count = n * one.k;
    const int64_t blocks = (count + one.block - 1) / one.block;
    Linear linear = MakeLinear();
    linear.Add("weight", "U8", {(count + 1) / 2, 1});
    linear.Add("weight.absmax", "F32", {blocks});
    for (int64_t i = 0; i < (count + 1) / 2; ++i) {
      linear.Put<uint8_t>("weight", i, static_cast<uint8_t>(2 * i % 16 << 4 | (2 * i + 1) % 16));
    }
    for (int64_t i = 0; i < blocks; ++i) {
      linear.Put<float>("weight.absmax", i, static_cast<float>(i + 1));
    }
    PutText(&linear, kNf4,
            "{\"blocksize\": " + std::to_string(one.block) + ", \"shape\": [3, " +
                std::to_string(one.k) + "]}");
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    EXPECT_EQ(weight->scheme.block_rows, one.group);
    for (int64_t i = 0; i < count; ++i) {
      const float scale = static_cast<float>(i / one.block + 1);
      EXPECT_EQ(WeightValue(*weight, i % one.k, i / one.k), (0.5f * (i % 16) - 1) * scale) << i;
    }
  }
}

TEST(BitsAndBytesFormat, QuantisedTwice) {
  Linear linear = MakeLinear();
  linear.Add("weight.absmax", "U8", {6});
  linear.Add("weight.nested_quant_map", "F32", {256});
  linear.Add("weight.nested_absmax", "F32", {2});
  linear.tensors.erase(kNf4);
  for (int i = 0; i < 6; ++i) linear.Put<uint8_t>("weight.absmax", i, static_cast<uint8_t>(i));
  for (int i = 0; i < 256; ++i) linear.Put<float>("weight.nested_quant_map", i, i * 0.25f);
  linear.Put<float>("weight.nested_absmax", 0, 2);
  linear.Put<float>("weight.nested_absmax", 1, 3);
  const std::string rest =
      R"("blocksize": 4, "shape": [3, 8], "nested_blocksize": 4, "nested_dtype": "float32")";
  PutText(&linear, kFp4, "{" + rest + R"(, "nested_offset": 0.5})");
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->Scale(1, 1), 3 * 0.25f * 2 + 0.5f);
  EXPECT_EQ(weight->Scale(1, 2), 5 * 0.25f * 3 + 0.5f);
  ExpectRefused(linear, {"no offset",
                         [&](Linear* l) { PutText(l, kFp4, "{" + rest + "}"); },
                         {"nested_offset of null"}});
  ExpectRefused(linear,
                {"huge offset",
                 [&](Linear* l) { PutText(l, kFp4, "{" + rest + R"(, "nested_offset": 1e300})"); },
                 {"nested_offset of number"}});
  ExpectRefused(linear, {"no map",
                         Without("weight.nested_quant_map"),
                         {"\"weight.nested_quant_map\": got nothing, expected F32 [256]"}});
  ExpectRefused(linear, {"map", WithShape("weight.nested_quant_map", {255}), {"got shape [255]"}});
  ExpectRefused(linear, {"largest",
                         WithShape("weight.nested_absmax", {1}),
                         {"\"weight.nested_absmax\": got shape [1], expected [2]"}});
}

TEST(BitsAndBytesFormat, Refusals) {
  const auto state = [](const std::string& text) {
    return [text](Linear* l) { PutText(l, kNf4, text); };
  };
  const std::vector<Refusal> refusals = {
      {"no weight", Without("weight"), {"\"weight\": got nothing"}},
      {"no absmax", Without("weight.absmax"), {"\"weight.absmax\": got nothing"}},
      {"no map", Without("weight.quant_map"), {"\"weight.quant_map\": got nothing"}},
      {"no state", Without(kNf4), {"bitsandbytes__nf4\": got nothing, expected U8, a JSON object"}},
      {"two states", [](Linear* l) { PutText(l, kFp4, "{}"); }, {"got it beside that of nf4"}},
      {"dtype", WithDtype("weight", "BF16"), {"\"weight\": got dtype BF16, expected U8"}},
      {"bytes", WithShape("weight", {11, 1}), {"\"weight\": got 11 bytes, expected 12 for shape"}},
      {"short", Short("weight"), {"\"weight\": got 11 bytes"}},
      {"scales", WithShape("weight.absmax", {5}), {"got shape [5], expected [6]"}},
      {"scale dtype", WithDtype("weight.absmax", "I32"), {"\"weight.absmax\": got dtype I32"}},
      {"NaN", [](Linear* l) { l->Put<uint32_t>("weight.absmax", 2, 0x7fc00000); }, {"got NaN"}},
      {"table", WithShape("weight.quant_map", {256}), {"got shape [256], expected [16]"}},
      {"NaN in the table",
       [](Linear* l) { l->Put<uint32_t>("weight.quant_map", 3, 0x7fc00000); },
       {"\"weight.quant_map\": got nan"}},
      {"no JSON", state("{\"shape\""), {"got other bytes, expected a JSON object"}},
      {"a list", state("[1]"), {"got other bytes, expected a JSON object"}},
      {"long", state(std::string(5000, ' ')), {"got 5000 bytes, expected at most 4096"}},
      {"no shape", state(R"({"blocksize": 4})"), {"shape of null"}},
      {"rank", state(R"({"blocksize": 4, "shape": [3, 8, 1]})"), {"shape of array"}},
      {"negative", state(R"({"blocksize": 4, "shape": [-3, 8]})"), {"shape of number"}},
      {"huge", state(R"({"blocksize": 4, "shape": [3, 99999999999]})"), {"out of range"}},
      {"lies",
       state(R"({"blocksize": 4, "shape": [3, 800]})"),
       {"expected 1200 for shape [3, 800]"}},
      {"no blocks", state(R"({"shape": [3, 8]})"), {"blocksize of null"}},
      {"scales of blocks over columns",
       state(R"({"blocksize": 16, "shape": [3, 8]})"),
       {"\"weight.absmax\": got shape [6], expected [2]"}},
      {"bias", [](Linear* l) { l->Add("bias", "F16", {2}); }, {"\"bias\": got shape [2]"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeLinear(), refusal);
  }
}

// N = 2, K = 3.
Linear MakeInt8() {
  Linear out = {.format = &kBitsAndBytesInt8Format};
  out.Add("weight", "I8", {2, 3});
  out.Add("SCB", "F32", {2});
  out.Add("weight_format", "U8", {});
  for (int i = 0; i < 6; ++i) out.Put<int8_t>("weight", i, static_cast<int8_t>(50 * i - 127));
  out.Put<float>("SCB", 0, 127);
  out.Put<float>("SCB", 1, 63.5f);
  return out;
}

TEST(BitsAndBytesInt8Format, EveryElement) {
  const auto weight = MakeInt8().Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w8cs+fp32");
  for (int n = 0; n < 2; ++n) {
    for (int k = 0; k < 3; ++k) {
      const int code = 50 * (n * 3 + k) - 127;
      EXPECT_EQ(WeightValue(*weight, k, n), static_cast<float>(code) / static_cast<float>(n + 1));
    }
  }
}

TEST(BitsAndBytesInt8Format, Refusals) {
  const std::vector<Refusal> refusals = {
      {"no weight", Without("weight"), {"\"weight\": got nothing"}},
      {"no SCB", Without("SCB"), {"\"SCB\": got nothing, expected F32 [N]"}},
      {"dtype", WithDtype("weight", "U8"), {"\"weight\": got dtype U8, expected I8"}},
      {"short", Short("weight"), {"\"weight\": got 5 bytes"}},
      {"SCB", WithShape("SCB", {3}), {"\"SCB\": got shape [3], expected [2]"}},
      {"SCB's dtype", WithDtype("SCB", "F16"), {"\"SCB\": got dtype F16"}},
      {"NaN", [](Linear* l) { l->Put<uint32_t>("SCB", 1, 0x7fc00000); }, {"got NaN at element 1"}},
      {"order", [](Linear* l) { l->Put<uint8_t>("weight_format", 0, 2); }, {"got 2, expected 0"}},
      {"bias", [](Linear* l) { l->Add("bias", "F16", {3}); }, {"\"bias\": got shape [3]"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeInt8(), refusal);
  }
}

TEST(BitsAndBytesFormats, TheSettingsSayWhich) {
  Setting config;
  config.members["quant_method"] = Setting::String("bitsandbytes");
  EXPECT_EQ(FindFormat(config).status().code(), absl::StatusCode::kUnimplemented);
  config.members["load_in_4bit"] = Setting::Literal(false);
  config.members["load_in_8bit"] = Setting::Literal(true);
  EXPECT_EQ(FindFormat(config)->format, &kBitsAndBytesInt8Format);
  config.members["load_in_4bit"] = Setting::Literal(true);
  EXPECT_EQ(FindFormat(config)->format, &kBitsAndBytesFormat);
  config.members["load_in_4bit"] = Setting::Literal(int64_t{1});
  EXPECT_THAT(std::string(FindFormat(config).status().message()), HasSubstr("load_in_4bit: got 1"));
}

}  // namespace
}  // namespace awqd
