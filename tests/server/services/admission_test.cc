// Every call of the running server passes admission: the methods are those that reflection lists,
// so that a new one which avoids it fails here.
#include "server/transport/admission.h"

#include <map>

#include "tests/server/method_outcomes.h"
#include "tests/server/services/raw_call.h"
#include "tests/server/services/rpc_fixture.h"

namespace awqd::services {
namespace {

using transport::Admission;

constexpr char kCheck[] = "grpc.health.v1.Health/Check";
// This call ends when the client ends it.
constexpr char kLive[] = "inference.GRPCInferenceService/ServerLive";
constexpr char kReady[] = "inference.GRPCInferenceService/ServerReady";
constexpr char kWatch[] = "grpc.health.v1.Health/Watch";

class EveryMethodTest : public RpcTest {
 protected:
  std::map<std::string, obs::MethodStats> Counted() const {
    std::map<std::string, obs::MethodStats> by_method;
    for (obs::MethodStats& calls : server_->admission()->Calls()) {
      by_method[calls.method] = std::move(calls);
    }
    return by_method;
  }

  // Sends an empty message, and returns how the call ended.
  grpc::Status Call(const std::string& method) {
    if (method != kWatch) return RawCall(channel_, "/" + method, "");
    RawStream watch(channel_, "/" + method);
    std::string first;
    EXPECT_TRUE(watch.Write("") && watch.WritesDone() && watch.Read(&first));
    watch.Cancel();
    return watch.Finish();
  }

  // Makes one call of `method`, and checks that it alone is counted, with the outcome that the
  // client saw.
  void CallIsCounted(const std::string& method, const std::string& as) {
    const std::map<std::string, obs::MethodStats> before = Counted();
    ASSERT_TRUE(before.contains(as)) << as << " is not in the table of methods";
    const grpc::StatusCode code = Call(method).error_code();
    ASSERT_TRUE(Eventually([&] { return EndedCalls(Counted()[as]) > EndedCalls(before.at(as)); }))
        << method << " did not pass admission";
    for (auto& [name, calls] : Counted()) {
      Outcomes expected = OutcomesOf(before.at(name));
      if (name == as) ++expected[code];
      EXPECT_EQ(OutcomesOf(calls), expected) << name << " after a call of " << method;
    }
  }
};

TEST_F(EveryMethodTest, PassesTheDoorOnceWithItsNameAndOutcome) {
  const std::set<std::string> methods = MethodsByReflection(channel_);
  EXPECT_THAT(methods, ::testing::IsSupersetOf({kCheck, kWatch, "awqd.v1.ServerInfo/GetServerInfo",
                                                "awqd.v1.QuantizedInference/QuantizedMatmulStream",
                                                kReflection + 1, kReflectionAlpha + 1}));
  for (const std::string& method : methods) CallIsCounted(method, method);
}

TEST_F(EveryMethodTest, OfTheDoorIsDescribedByReflection) {
  std::set<std::string> table;
  for (const auto& [method, calls] : Counted()) table.insert(method);
  table.erase(std::string(Admission::kUnknownMethod));
  EXPECT_EQ(table, MethodsByReflection(channel_));
}

TEST_F(EveryMethodTest, ThatDoesNotExistPassesAdmission) {
  const size_t methods = Counted().size();
  for (const char* method : {"awqd.v1.QuantizedInference/Nope", "no.Service/Nope", "x"}) {
    CallIsCounted(method, std::string(Admission::kUnknownMethod));
  }
  EXPECT_EQ(Counted().size(), methods) << "names from the wire take no memory";
}

// Starts draining alone, so that every method can still be called while it refuses.
TEST_F(EveryMethodTest, ButHealthIsTurnedAwayWhileDraining) {
  std::set<std::string> methods = MethodsByReflection(channel_);
  methods.insert("no.Service/Nope");
  server_->admission()->drain()->HoldNewCalls();
  server_->admission()->drain()->RejectNewCalls();
  for (const std::string& method : methods) {
    const grpc::StatusCode code = Call(method).error_code();
    if (method == kCheck || method == kLive || method == kReady) {
      EXPECT_EQ(code, grpc::StatusCode::OK);
    } else if (method == kWatch) {
      EXPECT_EQ(code, grpc::StatusCode::CANCELLED) << "as its client wanted";
    } else {
      EXPECT_EQ(code, grpc::StatusCode::UNAVAILABLE) << method;
    }
  }
  EXPECT_EQ(server_->admission()->drain()->rejected(), static_cast<int64_t>(methods.size()) - 4);
}

}  // namespace
}  // namespace awqd::services
