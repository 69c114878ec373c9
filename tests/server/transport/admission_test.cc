// Admission with identities and limits: who is admitted, and that a refused call is answered,
// counted and released.
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "tests/server/transport/loop_fixture.h"

namespace awqd::transport {
namespace {

using testing::HasSubstr;

// SHA-256 of "abc".
constexpr char kLine[] =
    "ian infer sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\n"
    // The digest of the empty text, which no caller can send.
    "rita read sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n";

class AdmissionTest : public LoopTest {
 protected:
  void Guard() {
    security::Options options;
    options.tokens = testing::TempDir() + "/awqd_admission_" + std::to_string(getpid());
    std::ofstream(options.tokens) << kLine;
    auto access = security::Access::Create(options);
    ASSERT_TRUE(access.ok()) << access.status();
    door_.Guard(*std::move(access));
    std::filesystem::remove(options.tokens);
  }
  grpc::Status CallWith(const std::string& authorization) {
    grpc::ClientContext context;
    if (!authorization.empty()) context.AddMetadata("authorization", authorization);
    v1::QuantizedMatmulResponse response;
    return stub_->QuantizedMatmul(&context, {}, &response);
  }
  int64_t Counted(grpc::StatusCode code) const {
    for (const MethodCalls& calls : door_.Calls()) {
      if (calls.method == kUnary) return calls.outcomes[code];
    }
    return -1;
  }
};

INSTANTIATE_TEST_SUITE_P(Threads, AdmissionTest, testing::Values(1, 4));

TEST_P(AdmissionTest, AHandlerMeetsThoseAloneThatMayCall) {
  std::atomic<int> handled{0};
  unary_ = [&](UnaryCall* call) {
    handled += call->identity() != nullptr && call->identity()->name == "ian";
    call->Answer(EmptyMessage());
  };
  Guard();
  Start();
  EXPECT_TRUE(CallWith("Bearer abc").ok());
  const grpc::Status wrong = CallWith("Bearer hunter2");
  EXPECT_EQ(wrong.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(wrong.error_message(), HasSubstr(kUnary));
  EXPECT_THAT(wrong.error_message(), testing::Not(HasSubstr("hunter2")));
  EXPECT_EQ(CallWith("").error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(handled, 1);
  EXPECT_EQ(Counted(grpc::StatusCode::OK), 1);
  EXPECT_EQ(Counted(grpc::StatusCode::UNAUTHENTICATED), 2);
  EXPECT_TRUE(Eventually([&] { return door_.gate()->in_flight() == 0; }));
}

TEST_P(AdmissionTest, RefusedCallsAreGone) {
  Guard();
  Start();
  for (int i = 0; i < 200; ++i) EXPECT_FALSE(CallWith("Bearer wrong").ok());
  EXPECT_TRUE(Eventually([&] { return door_.gate()->in_flight() == 0; }));
  EXPECT_TRUE(CallWith("Bearer abc").ok());
}

}  // namespace
}  // namespace awqd::transport
