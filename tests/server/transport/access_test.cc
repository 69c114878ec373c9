// Admission with identities: who may call, and that a rejected call is answered, counted and
// released.
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "tests/server/transport/loop_fixture.h"

namespace awqd::transport {
namespace {

using ::testing::HasSubstr;

// SHA-256 of "abc".
constexpr char kLine[] =
    "ian infer sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\n"
    // This one is of the empty text, which no caller can send.
    "rita read sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n";

class AccessTest : public LoopTest {
 protected:
  void RequireTokens() {
    security::Options options;
    options.tokens = testing::TempDir() + "/awqd_admission_" + std::to_string(getpid());
    std::ofstream(options.tokens) << kLine;
    auto access = security::Access::Create(options);
    ASSERT_TRUE(access.ok()) << access.status();
    admission_.SetAccess(*std::move(access));
    std::filesystem::remove(options.tokens);
  }
  grpc::Status CallWith(const std::string& authorization) {
    grpc::ClientContext context;
    if (!authorization.empty()) context.AddMetadata("authorization", authorization);
    v1::QuantizedMatmulResponse response;
    return stub_->QuantizedMatmul(&context, {}, &response);
  }
  int64_t Counted(grpc::StatusCode code) const {
    for (const obs::MethodStats& calls : admission_.Calls()) {
      if (calls.method == kUnary) return calls.durations_ns[code].total();
    }
    return -1;
  }
};

INSTANTIATE_TEST_SUITE_P(Threads, AccessTest, ::testing::Values(1, 4));

TEST_P(AccessTest, AHandlerMeetsThoseAloneThatMayCall) {
  std::atomic<int> handled{0};
  unary_ = [&](UnaryCall* call) {
    handled += call->identity() != nullptr && call->identity()->name == "ian";
    call->Answer(EmptyMessage());
  };
  RequireTokens();
  Start();
  EXPECT_TRUE(CallWith("Bearer abc").ok());
  const grpc::Status wrong = CallWith("Bearer hunter2");
  EXPECT_EQ(wrong.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(wrong.error_message(), HasSubstr(kUnary));
  EXPECT_THAT(wrong.error_message(), ::testing::Not(HasSubstr("hunter2")));
  EXPECT_EQ(CallWith("").error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(handled, 1);
  EXPECT_EQ(Counted(grpc::StatusCode::OK), 1);
  EXPECT_EQ(Counted(grpc::StatusCode::UNAUTHENTICATED), 2);
  EXPECT_TRUE(Eventually([&] { return admission_.drain()->in_flight() == 0; }));
}

TEST_P(AccessTest, RefusedCallsAreGone) {
  RequireTokens();
  Start();
  for (int i = 0; i < 200; ++i) EXPECT_FALSE(CallWith("Bearer wrong").ok());
  EXPECT_TRUE(Eventually([&] { return admission_.drain()->in_flight() == 0; }));
  EXPECT_TRUE(CallWith("Bearer abc").ok());
}

}  // namespace
}  // namespace awqd::transport
