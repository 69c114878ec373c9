// Inline weights: good ones decode, bad ones name the client's field.
#include "server/wire/packed_weight.h"

#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/wire/status.h"
#include "tests/server/requests.h"

namespace awqd::wire {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(PackedWeight, DecodesRawAndTypedTensors) {
  v1::PackedWeight packed = GoodPacked();
  v1::Tensor* zeros = packed.mutable_qzeros();
  zeros->clear_contents();
  zeros->mutable_ints()->add_values(0x75316420);
  zeros->mutable_ints()->add_values(-1);
  ASSERT_TRUE(CheckPacked(packed, 4096).ok());
  const CanonicalWeight weight = *DecodePacked(packed);
  EXPECT_EQ(weight.k, 128);
  EXPECT_EQ(weight.n, 16);
  EXPECT_EQ(weight.scheme.group_size, 128);
  for (int column = 0; column < 8; ++column) EXPECT_EQ(weight.Zero(0, column), column);
  EXPECT_EQ(weight.Zero(0, 15), 15);
}

TEST(PackedWeight, TakesTheWholeOfKAsOneGroup) {
  v1::PackedWeight packed = GoodPacked();
  packed.set_group_size(-1);
  packed.set_bits(4);
  *packed.mutable_bias() = RawTensor(v1::BF16, {16}, 32);
  const CanonicalWeight weight = *DecodePacked(packed);
  EXPECT_EQ(weight.scheme.group_size, 128);
  EXPECT_EQ(weight.bias.size(), 16u);
}

std::string Spoilt(const std::function<void(v1::PackedWeight*)>& spoil) {
  v1::PackedWeight packed = GoodPacked();
  spoil(&packed);
  absl::Status status = CheckPacked(packed, 1 << 20);
  if (status.ok()) status = DecodePacked(packed).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("tensor \"")));
  return FieldOf(status);
}

TEST(PackedWeight, NamesTheBadField) {
  using P = v1::PackedWeight;
  EXPECT_EQ(Spoilt([](P* p) { p->Clear(); }), "packed.qweight");
  EXPECT_EQ(Spoilt([](P* p) { p->clear_qzeros(); }), "packed.qzeros");
  EXPECT_EQ(Spoilt([](P* p) { p->clear_scales(); }), "packed.scales");
  EXPECT_EQ(Spoilt([](P* p) { p->set_bits(8); }), "packed.bits");
  EXPECT_EQ(Spoilt([](P* p) { p->set_group_size(-2); }), "packed.group_size");
  EXPECT_EQ(Spoilt([](P* p) { p->set_group_size(100); }), "packed.group_size");
  EXPECT_EQ(Spoilt([](P* p) { p->set_group_size(256); }), "packed.group_size");
  EXPECT_EQ(Spoilt([](P* p) { p->set_group_size(64); }), "packed.scales");
  EXPECT_EQ(Spoilt([](P* p) { p->mutable_qweight()->set_dtype(v1::FP32); }),
            "packed.qweight.dtype");
  EXPECT_EQ(Spoilt([](P* p) { *p->mutable_qweight() = RawTensor(v1::INT32, {256}, 1024); }),
            "packed.qweight.shape");
  EXPECT_EQ(Spoilt([](P* p) {
              *p->mutable_qweight() = RawTensor(v1::INT32, {128, 3}, 1536);
            }),
            "packed.qweight");
  EXPECT_EQ(Spoilt([](P* p) {
              *p->mutable_qweight() = RawTensor(v1::INT32, {0, 2}, 0);
            }),
            "packed.qweight");
  EXPECT_EQ(Spoilt([](P* p) {
              *p->mutable_qzeros() = RawTensor(v1::INT32, {2, 2}, 16);
            }),
            "packed.qzeros");
  EXPECT_EQ(Spoilt([](P* p) {
              *p->mutable_scales() = RawTensor(v1::BF16, {1, 16}, 32);
            }),
            "packed.scales.dtype");
  EXPECT_EQ(Spoilt([](P* p) {
              *p->mutable_scales() = RawTensor(v1::FP16, {3, 16}, 96);
            }),
            "packed.scales");
  EXPECT_EQ(Spoilt([](P* p) { *p->mutable_bias() = RawTensor(v1::FP16, {8}, 16); }), "packed.bias");
  EXPECT_EQ(Spoilt([](P* p) {
              *p->mutable_bias() = RawTensor(v1::FP16, {1, 16}, 32);
            }),
            "packed.bias.shape");
  EXPECT_EQ(Spoilt([](P* p) { p->mutable_scales()->mutable_raw()->pop_back(); }),
            "packed.scales.raw");
}

TEST(PackedWeight, IsBounded) {
  const int64_t bytes = 1024 + 8 + 32;
  EXPECT_TRUE(CheckPacked(GoodPacked(), bytes).ok());
  const absl::Status status = CheckPacked(GoodPacked(), bytes - 1);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("max_inline_weight_bytes"));
}

}  // namespace
}  // namespace awqd::wire
