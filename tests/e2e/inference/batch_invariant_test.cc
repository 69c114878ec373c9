// --batch_invariant through the real server: a token's bits do not depend on its batch.
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/e2e/server_process.h"

namespace awqd {
namespace {

using client::Tensor;

constexpr int64_t kK = 384, kN = 384;
constexpr int64_t kTokens = 300;  // the default path changes at 256

TEST(BatchInvariantTest, ATokenHasTheSameBitsAloneAndAmongMany) {
  ServerProcess server({"--model_repository=" + DemoRepository(), "--batch_invariant"});
  ASSERT_TRUE(server.WaitServing()) << server.log();
  const auto client = server.NewClient();
  std::mt19937 engine(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(kTokens * kK);
  for (float& value : values) value = normal(engine);
  const auto product = [&](int64_t first, int64_t tokens) {
    const std::vector<float> rows(values.begin() + first * kK,
                                  values.begin() + (first + tokens) * kK);
    auto y = client->QuantizedMatmul(
        {.weight = client::WeightName{kDemoModel, "encoder.layer.0.attention.self.query"},
         .activations = *Tensor::FromFloats(v1::FP32, {tokens, kK}, rows)});
    EXPECT_TRUE(y.ok()) << y.status();
    return *std::move(y);
  };
  const auto all = product(0, kTokens);
  EXPECT_EQ(all.execution.path(), v1::FUSED);
  const int64_t row_bytes = static_cast<int64_t>(all.output.bytes.size()) / kTokens;
  ASSERT_EQ(row_bytes % kN, 0);
  for (const auto& [first, tokens] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 1}, {7, 1}, {299, 1}, {3, 2}, {40, 17}, {100, 128}}) {
    const auto some = product(first, tokens);
    EXPECT_EQ(some.output.bytes, all.output.bytes.substr(first * row_bytes, tokens * row_bytes))
        << tokens << " tokens from " << first << " on";
  }
  EXPECT_EQ(server.Stop().code, 0);
}

}  // namespace
}  // namespace awqd
