// "fp-quant": its settings, its tensors, and every refusal.
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

constexpr uint16_t kOne = 0x3f80, kTwo = 0x4000;  // BF16

// N = 1, K = 64, blocks of 2.
Linear MakeMxfp4() {
  Linear out = {.format = &kFpQuantFormat};
  out.Set("forward_dtype", Setting::String("mxfp4"));
  out.Add("qweight", "U8", {1, 32});
  out.Put<uint8_t>("qweight", 0, 0x42);  // 1, 2
  out.Add("scales", "U8", {1, 2});
  out.Put<uint8_t>("scales", 0, 128);  // 2
  out.Add("weight_global_scale", "BF16", {1});
  out.Put("weight_global_scale", 0, kOne);
  out.Add("forward_hadamard_matrix", "BF16", {2, 2});
  for (int i = 0; i < 4; ++i) {
    out.Put<uint16_t>("forward_hadamard_matrix", i, i == 3 ? 0xbf35 : 0x3f35);
  }
  return out;
}

TEST(FpQuant, CodesScalesAndTransform) {
  Linear linear = MakeMxfp4();
  auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "e2m1g32+e8m0");
  EXPECT_EQ(weight->Code(1, 0), 4);
  EXPECT_EQ(weight->hadamard, (Hadamard{2, 0.70703125f}));
  linear.Put("weight_global_scale", 0, kTwo);
  weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->Outer(0), 0.5f);
  EXPECT_EQ(ToString(weight->scheme), "e2m1g32+e8m0*t");
  linear.Set("forward_dtype", Setting::String("nvfp4"));
  linear.Add("scales", "U8", {1, 4});
  weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "e2m1g16+e4m3*t");
}

TEST(FpQuant, NamesThePart) {
  const auto expect = [](const char* says, const std::function<void(Linear*)>& change) {
    Linear linear = MakeMxfp4();
    change(&linear);
    const absl::Status status = linear.Decode().status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  };
  expect("forward_dtype: got \"mxfp8\"",
         [](Linear* linear) { linear->Set("forward_dtype", Setting::String("mxfp8")); });
  expect("tensor \"scales\": got 4 groups, expected 2",  // padded as kernels take them
         [](Linear* linear) {
           linear->Add("scales", "U8", {128, 4});
         });
  expect("tensor \"weight_global_scale\": got 0, expected a positive number",
         [](Linear* linear) { linear->Put<uint16_t>("weight_global_scale", 0, 0); });
  expect("weight_global_scale",
         [](Linear* linear) { linear->tensors.erase("weight_global_scale"); });
  expect("forward_hadamard_matrix",
         [](Linear* linear) { linear->tensors.erase("forward_hadamard_matrix"); });
  expect("\"forward_hadamard_matrix\": got 0 at [0, 1]", [](Linear* linear) {
    for (int i = 0; i < 4; ++i) {  // "transform_init": "identity"
      linear->Put<uint16_t>("forward_hadamard_matrix", i, i % 3 == 0 ? kOne : 0);
    }
  });
}

TEST(FpQuant, Settings) {
  Setting config;
  config.members["quant_method"] = Setting::String("fp_quant");
  config.members["hadamard_group_size"] = Setting::Literal(int64_t{32});
  auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kFpQuantFormat);
  for (const std::string name : {"pseudoquantization", "store_master_weights"}) {
    Setting floats = config;
    floats.members[name] = Setting::Literal(true);
    found = FindFormat(floats);
    EXPECT_TRUE(absl::IsUnimplemented(found.status()));
    EXPECT_THAT(std::string(found.status().message()), HasSubstr(name + ": got true"));
  }
}

}  // namespace
}  // namespace awqd
