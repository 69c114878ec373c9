// Weights through the real server and the real client: dequantized, by blocks, sent inline.
#include <cstring>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/half.h"
#include "tests/e2e/inference/inference_fixture.h"

namespace awqd {
namespace {

using client::Tensor;
using client::WeightName;

TEST_F(InferenceTest, RangesOfADequantizedWeight) {
  const auto whole = client_->Dequantize({.weight = WeightName{kDemoModel, kQuery}});
  const auto block = client_->Dequantize({.weight = WeightName{kDemoModel, kQuery},
                                          .row_begin = 3,
                                          .row_end = 131,
                                          .column_begin = 5,
                                          .column_end = 78});
  ASSERT_TRUE(whole.ok() && block.ok()) << block.status();
  EXPECT_THAT(block->output.shape, ::testing::ElementsAre(128, 73));
  for (int64_t row = 0; row < 128; ++row) {
    ASSERT_EQ(block->output.bytes.substr(row * 146, 146),
              whole->output.bytes.substr(((row + 3) * kN + 5) * 2, 146));
  }
  const auto bf16 = client_->Dequantize(
      {.weight = WeightName{kDemoModel, kQuery}, .output_dtype = v1::BF16, .row_begin = kK - 1});
  ASSERT_TRUE(bf16.ok()) << bf16.status();
  EXPECT_THAT(bf16->output.shape, ::testing::ElementsAre(1, kN));
}

TEST_F(InferenceTest, BigWeightThroughTheStreamOnly) {
  const WeightName weight{"big", "layer"};
  int64_t rows = 0, blocks = 0, wrong = 0;
  const auto execution =
      client_->DequantizeBlocks({.weight = weight}, [&](const client::DequantizeBlock& block) {
        EXPECT_EQ(block.first_row, rows);
        EXPECT_EQ(block.total_rows, kBigK);
        for (int64_t row = 0; row < block.values.shape[0]; ++row) {
          for (int64_t column = row % 7; column < kBigN; column += 7) {
            uint16_t bits;
            std::memcpy(&bits, block.values.bytes.data() + (row * kBigN + column) * 2, 2);
            wrong += bits == big_->At(rows + row, column) ? 0 : 1;
          }
        }
        rows += block.values.shape[0];
        ++blocks;
        return absl::OkStatus();
      });
  ASSERT_TRUE(execution.ok()) << execution.status();
  EXPECT_EQ(rows, kBigK);
  EXPECT_GT(blocks, 1);
  EXPECT_EQ(wrong, 0);
}

TEST_F(InferenceTest, InlineWeight) {
  const SyntheticAwq weight = SyntheticAwq::Random(64, 24, 32, 3);
  const auto w = client_->Dequantize({.weight = weight.ToPacked()});
  ASSERT_TRUE(w.ok()) << w.status();
  ASSERT_THAT(w->output.shape, ::testing::ElementsAre(64, 24));
  const std::vector<float> x = Random(2 * 64, 5);
  const auto y = client_->QuantizedMatmul(
      {.weight = weight.ToPacked(), .activations = *Tensor::FromFloats(v1::FP32, {2, 64}, x)});
  ASSERT_TRUE(y.ok()) << y.status();
  std::vector<double> expected(2 * 24, 0.0);
  for (int64_t row = 0; row < 64; ++row) {
    for (int64_t column = 0; column < 24; ++column) {
      uint16_t bits;
      std::memcpy(&bits, w->output.bytes.data() + (row * 24 + column) * 2, 2);
      ASSERT_EQ(bits, weight.At(row, column));
      for (int64_t m = 0; m < 2; ++m) {
        expected[m * 24 + column] += double{x[m * 64 + row]} * HalfToFloat(bits);
      }
    }
  }
  EXPECT_LE(RelativeError(y->output, expected), 1e-3);
}

TEST_F(InferenceTest, OddInlineWeightsAreRefused) {
  const SyntheticAwq weight = SyntheticAwq::Random(64, 16, 32, 3);
  const auto error = [&](auto change) {
    v1::PackedWeight packed = weight.ToPacked();
    change(packed);
    return client_->Dequantize({.weight = packed}).status().code();
  };
  EXPECT_EQ(error([](v1::PackedWeight&) {}), absl::StatusCode::kOk);
  for (const int group : {-2, 5, 128}) {
    EXPECT_EQ(error([group](v1::PackedWeight& p) { p.set_group_size(group); }),
              absl::StatusCode::kInvalidArgument)
        << group;
  }
  EXPECT_EQ(error([](v1::PackedWeight& p) { p.set_bits(9); }), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(error([](v1::PackedWeight& p) { p.clear_qzeros(); }),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(error([](v1::PackedWeight& p) { p.mutable_scales()->mutable_raw()->pop_back(); }),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(error([](v1::PackedWeight& p) { p.mutable_scales()->set_dtype(v1::INT32); }),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace awqd
