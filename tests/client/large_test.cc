// Requests of 2 GiB and more, which gRPC cannot send.
#include <unistd.h>

#include <string>

#include "client/awqd_client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd::client {
namespace {

using ::testing::HasSubstr;

constexpr size_t kTooLarge = size_t{1} << 31;

class LargeRequestTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // Two copies, because a call keeps the caller's.
    if (sysconf(_SC_AVPHYS_PAGES) < int64_t{6 << 20} / (sysconf(_SC_PAGESIZE) / 1024)) {
      GTEST_SKIP() << "less than 6 GiB of free memory";
    }
  }

  static MatmulCall Call() {
    return {.weight = WeightName{"m", "w"},
            .activations = {v1::FP16, {1, kTooLarge / 2}, std::string(kTooLarge, '\0')}};
  }
  static void ExpectRefused(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("request: got 21474836"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("bytes, expected at most 2147483647"));
  }

  // No server listens, because nothing may be sent.
  const std::unique_ptr<Client> client_ = *Client::Create({.address = "127.0.0.1:1"});
};

TEST_F(LargeRequestTest, MatmulIsRefused) {
  ExpectRefused(client_->QuantizedMatmul(Call()).status());
}

TEST_F(LargeRequestTest, SendIsRefused) {
  ExpectRefused(client_->QuantizedMatmulStream()->Send(Call()));
}

TEST_F(LargeRequestTest, DequantizeIsRefused) {
  v1::PackedWeight weight;
  weight.mutable_qweight()->mutable_raw()->resize(kTooLarge);
  const DequantizeCall call = {.weight = std::move(weight)};
  ExpectRefused(
      client_->DequantizeBlocks(call, [](DequantizeBlock) { return absl::OkStatus(); }).status());
}

}  // namespace
}  // namespace awqd::client
