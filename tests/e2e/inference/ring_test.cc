// Rings against the real server: the bits of the RPC, batches with other callers, experts and MLPs,
// identities, clients that are killed at each step, and a server that is.
#include "client/ring.h"

#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using client::RingAnswer;
using client::Tensor;
using client::WeightName;
using ::testing::AllOf, ::testing::HasSubstr;

constexpr int64_t kK = 256, kN = 512;

class RingE2eTest : public ServerTest {
 protected:
  void SetUp() override {
    SyntheticAwq::Random(kK, kN, 64, 1).Write(repository_ / "m");
    Start({"--ring_path=" + path_, "--ring_spin_us=20"});
  }
  static client::MatmulCall Call(int64_t tokens, v1::DType dtype) {
    return LayerCall(tokens, kK, dtype);
  }
  std::unique_ptr<client::Ring> Open() {
    auto ring = client::Ring::Open({.path = path_});
    EXPECT_TRUE(ring.ok()) << ring.status();
    return ring.ok() ? *std::move(ring) : nullptr;
  }

  TempFolder folder_;
  const std::string path_ = folder_ / "ring.sock";
};

TEST_F(RingE2eTest, TheSameBitsAsTheRpc) {
  const auto ring = Open();
  ASSERT_NE(ring, nullptr);
  for (const v1::DType dtype : {v1::FP16, v1::BF16, v1::FP32}) {
    const auto prepared = ring->Prepare(Call(1, dtype));
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    for (const int64_t tokens : {0, 1, 33, 300}) {
      const client::MatmulCall call = Call(tokens, dtype);
      const auto sent = client_->QuantizedMatmul(call);
      ASSERT_TRUE(sent.ok()) << sent.status();
      const std::string& x = call.activations.bytes;
      std::memcpy(ring->payload() + 64, x.data(), x.size());
      const auto y_offset = static_cast<int64_t>(64 + x.size());
      const RingAnswer got = ring->Run(
          {.call = prepared->number, .tokens = tokens, .x_offset = 64, .y_offset = y_offset});
      ASSERT_TRUE(got.status.ok()) << got.status;
      EXPECT_EQ(got.execution.kernel(), sent->execution.kernel());
      EXPECT_EQ(got.execution.device(), "cpu");
      EXPECT_EQ(absl::string_view(ring->payload() + y_offset, got.y_bytes), sent->output.bytes);
    }
  }
}

TEST_F(RingE2eTest, TheAnswerMayOverwriteTheTokens) {
  const auto ring = Open();
  const auto prepared = ring->Prepare(Call(1, v1::FP16));
  const client::MatmulCall call = Call(8, v1::FP16);
  const auto sent = client_->QuantizedMatmul(call);
  std::memcpy(ring->payload(), call.activations.bytes.data(), call.activations.bytes.size());
  const RingAnswer got = ring->Run({.call = prepared->number, .tokens = 8});
  ASSERT_TRUE(got.status.ok()) << got.status;
  EXPECT_EQ(absl::string_view(ring->payload(), got.y_bytes), sent->output.bytes);
}

// Three products, each of the one before: the bits of three calls.
TEST_F(RingE2eTest, AChainHasTheBitsOfItsSteps) {
  SyntheticAwq::Random(kK, kK, 64, 2).Write(repository_ / "square");
  ASSERT_TRUE(client_->LoadModel("square").ok());
  client::MatmulCall call = Call(5, v1::FP16);
  const std::string x = call.activations.bytes;
  std::string expected;
  std::vector<client::RingStep> steps;
  const auto ring = Open();
  for (uint32_t i = 0; i < 3; ++i) {
    call.weight = WeightName{i < 2 ? "square" : "m", "layer"};
    call.activation_function = v1::RELU;
    steps.push_back({*ring->Prepare(call), i});
    const auto sent = client_->QuantizedMatmul(call);
    ASSERT_TRUE(sent.ok()) << sent.status();
    expected += sent->output.bytes;
    call.activations = sent->output;
  }
  const auto chain = ring->PrepareChain(steps);
  ASSERT_TRUE(chain.ok()) << chain.status();
  std::memcpy(ring->payload(), x.data(), x.size());
  const RingAnswer got = ring->Run({.call = chain->number, .tokens = 5, .y_offset = 4096});
  ASSERT_TRUE(got.status.ok()) << got.status;
  EXPECT_EQ(got.y_bytes, 5 * chain->y_bytes);
  EXPECT_EQ(absl::string_view(ring->payload() + 4096, got.y_bytes), expected);
}

// Logits in place of ids; then the same experts in a chain, whose first step makes the logits.
TEST_F(RingE2eTest, RoutersAndChainsOfExperts) {
  const auto read = [](const std::string& name) {
    return ReadTensor(DataPath("experts/blocks_goldens/" + name + ".npy"));
  };
  std::filesystem::copy(DataPath("experts/blocks"), repository_ / "blocks");
  SyntheticAwq::Random(64, 8, 32, 3).Write(repository_ / "gate");
  ASSERT_TRUE(client_->LoadModel("blocks").ok() && client_->LoadModel("gate").ok());
  client::MatmulCall gate = {
      .weight = WeightName{"gate", "layer"}, .activations = read("x"), .output_dtype = v1::FP32};
  const auto gated = client_->QuantizedMatmul(gate);
  ASSERT_TRUE(gated.ok()) << gated.status();
  v1::GatedMlpRef ref;
  ref.set_model("blocks");
  ref.set_path("mlp.experts.*");
  client::GatedMlpCall mlp = {.mlp = ref, .activations = gate.activations};
  mlp.router = client::Router{.logits = gated->output, .top_k = 3, .scoring = v1::SIGMOID};
  mlp.router->correction_bias = read("correction_bias");
  const auto expected = client_->GatedMlp(mlp);
  ASSERT_TRUE(expected.ok()) << expected.status();

  const auto ring = Open();
  const auto prepared = ring->Prepare(mlp);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_EQ(prepared->router_bytes, 8 * 4);
  const std::string& x = gate.activations.bytes;
  const std::string& logits = gated->output.bytes;
  const int64_t tokens = gate.activations.shape[0];
  std::memcpy(ring->payload(), x.data(), x.size());
  std::memcpy(ring->payload() + 8192, logits.data(), logits.size());
  client::RingCall call = {
      .call = prepared->number, .tokens = tokens, .y_offset = 16384, .router_offset = 8192};
  const RingAnswer got = ring->Run(call);
  ASSERT_TRUE(got.status.ok()) << got.status;
  EXPECT_EQ(absl::string_view(ring->payload() + 16384, got.y_bytes), expected->output.bytes);

  const auto chain = ring->PrepareChain({{*ring->Prepare(gate)}, {*prepared, 0, 1}});
  ASSERT_TRUE(chain.ok()) << chain.status();
  EXPECT_EQ(chain->router_bytes, 0);
  call.call = chain->number;
  call.router_offset = -1;  // unused
  const RingAnswer all = ring->Run(call);
  ASSERT_TRUE(all.status.ok()) << all.status;
  EXPECT_EQ(absl::string_view(ring->payload() + 16384, all.y_bytes),
            logits + expected->output.bytes);
  std::memset(ring->payload() + 8192, 0xff, logits.size());  // no numbers
  call = {.call = prepared->number, .tokens = tokens, .y_offset = 16384, .router_offset = 8192};
  EXPECT_EQ(ring->Run(call).status.ok(), client_
                                             ->GatedMlp([&] {
                                               mlp.router->logits.bytes.assign(logits.size(), -1);
                                               return mlp;
                                             }())
                                             .ok());
}

// Ids and router weights of the call, for all steps of experts.
TEST_F(RingE2eTest, AChainOfExpertsTakesTheIdsOfItsCall) {
  std::filesystem::copy(DataPath("experts/moe"), repository_ / "moe");
  ASSERT_TRUE(client_->LoadModel("moe").ok());
  const auto read = [](const std::string& name) {
    return ReadTensor(DataPath("experts/goldens/" + name + ".npy"));
  };
  const client::Routing routing = {read("ids"), read("router")};
  const auto model = client_->GetModel("moe");
  ASSERT_GT(model->stacks_size(), 0);
  const auto ring = Open();
  std::vector<client::RingStep> steps;
  std::string expected;
  const Tensor x = read("x");
  for (const v1::StackInfo& stack : model->stacks()) {
    client::GroupedMatmulCall call = {
        .stack = WeightName{"moe", stack.path()}, .activations = x, .routing = routing};
    const auto sent = client_->GroupedQuantizedMatmul(call);
    if (!sent.ok()) continue;  // its activations have another width
    expected += sent->output.bytes;
    steps.push_back({*ring->Prepare(call)});
  }
  ASSERT_GT(steps.size(), 1u);
  const auto chain = ring->PrepareChain(steps);
  ASSERT_TRUE(chain.ok()) << chain.status();
  EXPECT_GT(chain->ids_bytes, 0);
  int64_t at = 0;
  const auto place = [&](const Tensor& tensor) {
    const int64_t begin = at;
    std::memcpy(ring->payload() + at, tensor.bytes.data(), tensor.bytes.size());
    at += static_cast<int64_t>(tensor.bytes.size());
    return begin;
  };
  client::RingCall call = {.call = chain->number, .tokens = x.shape[0]};
  call.x_offset = place(x);
  call.ids_offset = place(routing.expert_ids);
  call.router_offset = place(*routing.router_weights);
  call.y_offset = at;
  const RingAnswer got = ring->Run(call);
  ASSERT_TRUE(got.status.ok()) << got.status;
  EXPECT_EQ(absl::string_view(ring->payload() + at, got.y_bytes), expected);
  call.ids_offset = ring->payload_bytes();
  EXPECT_THAT(std::string(ring->Run(call).status.message()), HasSubstr("step 1: ids_offset"));
}

TEST_F(RingE2eTest, ScalesOfEachToken) {
  client::MatmulCall call = Call(7, v1::FP16);
  call.activations.dtype = v1::INT8;
  call.activations.bytes.resize(7 * kK);
  call.activation_scales = *Tensor::FromFloats(v1::FP32, {7}, {1, 2, 0.5f, 0.1f, 3, 4, 0.25f});
  const auto sent = client_->QuantizedMatmul(call);
  ASSERT_TRUE(sent.ok()) << sent.status();
  const auto ring = Open();
  client::MatmulCall form = call;
  form.activation_scales = Tensor{v1::FP32, {1}, ""};
  const auto prepared = ring->Prepare(form);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  const std::string bytes = call.activations.bytes + call.activation_scales->bytes;
  std::memcpy(ring->payload(), bytes.data(), bytes.size());
  const RingAnswer got =
      ring->Run({.call = prepared->number, .tokens = 7, .y_offset = 8192, .scales_offset = 7 * kK});
  ASSERT_TRUE(got.status.ok()) << got.status;
  EXPECT_EQ(absl::string_view(ring->payload() + 8192, got.y_bytes), sent->output.bytes);
}

// Ring callers and RPC callers at once: every answer right, and some of them in one batch.
TEST_F(RingE2eTest, ManyCallersOfBothKinds) {
  const client::MatmulCall call = Call(1, v1::FP16);
  const std::string expected = client_->QuantizedMatmul(call)->output.bytes;
  const auto ring = Open();
  const auto prepared = *ring->Prepare(Call(1, v1::FP16));
  std::atomic<int> wrong{0}, merged{0};
  std::vector<std::thread> callers;
  for (int64_t i = 0; i < 12; ++i) {
    callers.emplace_back([&, i] {
      const int64_t at = i * 4096;
      std::memcpy(ring->payload() + at, call.activations.bytes.data(), prepared.x_bytes);
      for (int j = 0; j < 200; ++j) {
        if (i % 3 == 0) {
          const auto sent = client_->QuantizedMatmul(call);
          wrong += !sent.ok() || sent->output.bytes != expected;
          continue;
        }
        const RingAnswer got = ring->Run({.call = prepared.number,
                                          .tokens = 1,
                                          .x_offset = at,
                                          .y_offset = at + prepared.x_bytes});
        const absl::string_view y(ring->payload() + at + prepared.x_bytes, expected.size());
        wrong += !got.status.ok() || y != expected;
        merged += got.execution.batch_requests() > 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(merged, 0);
}

// Clients that are killed while they connect, prepare and call leave the server as it was.
TEST_F(RingE2eTest, ClientsThatAreKilled) {
  const int files = server_->open_files();
  int killed = 0;
  // A client that a sanitizer slows down takes longer to get a ring.
  const auto closed = [&] { return absl::StrContains(server_->log(), "ring closed"); };
  for (int ms = 5; ms < 150 || (ms < 10'000 && !closed()); ms += ms / 5 + 2) {
    const ExitReport report =
        server_->Awqctl({"bench", "--weight=m/layer", "--tokens=1,300", "--ring=" + path_,
                         "--warmup=0", "--duration=60", "--concurrency=4"},
                        absl::Milliseconds(ms));
    killed += !report.exited;
  }
  EXPECT_GT(killed, 10);
  EXPECT_LE(server_->OpenFilesAgain(files), files);
  const auto ring = Open();
  EXPECT_TRUE(ring->Run({}).status.ok());
  EXPECT_THAT(server_->log(), HasSubstr("ring closed"));
}

TEST_F(RingE2eTest, AServerThatIsKilledFreesItsCallers) {
  const auto ring = Open();
  const auto prepared = ring->Prepare(Call(1, v1::FP16));
  std::thread killer([&] { server_->Signal(SIGKILL); });
  absl::Status status;
  while (status.ok()) status = ring->Run({.call = prepared->number, .tokens = 1}).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  killer.join();
  EXPECT_EQ(client::Ring::Open({.path = path_}).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(RingE2eTest, AReloadAndAnUnloadBetweenCalls) {
  const auto ring = Open();
  const auto prepared = ring->Prepare(Call(1, v1::FP16));
  const auto run = [&] { return ring->Run({.call = prepared->number, .tokens = 1}).status; };
  EXPECT_TRUE(run().ok());
  EXPECT_TRUE(client_->LoadModel("m").ok());
  EXPECT_TRUE(run().ok());
  EXPECT_TRUE(client_->UnloadModel("m").ok());
  EXPECT_EQ(run().code(), absl::StatusCode::kNotFound) << run();
  EXPECT_TRUE(client_->LoadModel("m").ok());
  EXPECT_TRUE(run().ok());
}

TEST_F(RingE2eTest, TokensAndRoles) {
  const auto make_token = [&](const std::string& name, const std::string& roles) {
    EXPECT_EQ(server_
                  ->Awqctl({"token", name, "--roles", roles, "--out", folder_ / name, "--append",
                            folder_ / "tokens"})
                  .code,
              0);
  };
  make_token("alice", "infer");
  make_token("bob", "read");
  Stop();
  Start({"--ring_path=" + path_, "--tokens=" + (folder_ / "tokens"), "--max_rings_per_client=1"});
  const auto open = [&](const std::string& token_file) {
    return client::Ring::Open({.path = path_, .security = {.token_file = token_file}});
  };
  EXPECT_EQ(open("").status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(open(folder_ / "bob").status().code(), absl::StatusCode::kPermissionDenied);
  const auto ring = open(folder_ / "alice");
  ASSERT_TRUE(ring.ok()) << ring.status();
  EXPECT_TRUE((*ring)->Run({}).status.ok());
  EXPECT_EQ(open(folder_ / "alice").status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(RingE2eTest, CallsAreLoggedWithTheTraceOfTheirCallers) {
  Stop();
  Start({"--ring_path=" + path_, "--access_log=all"});
  const auto ring = Open();
  const auto prepared = ring->Prepare(Call(1, v1::FP16));
  const RingAnswer answer =
      ring->Run({.call = prepared->number,
                 .tokens = 2,
                 .traceparent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"});
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_TRUE(Eventually([&] {
    const std::string log = server_->log();
    return absl::StrContains(log, "method=awqd.ring.QuantizedInference/QuantizedMatmul code=OK") &&
           absl::StrContains(log,
                             "trace=0123456789abcdef0123456789abcdef model=m weight=layer "
                             "requests=1 tokens=2");
  })) << server_->log();
}

TEST_F(RingE2eTest, TheServerTellsItsPath) {
  EXPECT_EQ(client_->GetServerInfo()->limits().ring_path(), path_);
}

TEST_F(RingE2eTest, AwqctlBenchesIt) {
  const auto bench = [&](std::vector<std::string> more) {
    std::vector<std::string> args = {"--json",       "bench",      "--weight=m/layer",
                                     "--tokens=1,5", "--warmup=0", "--duration=0.3"};
    args.insert(args.end(), more.begin(), more.end());
    return server_->Awqctl(args);
  };
  for (const char* more : {"--concurrency=3", "--ring_empty"}) {
    const ExitReport report = bench({"--ring=" + path_, more});
    EXPECT_EQ(report.code, 0) << report.log;
    EXPECT_THAT(report.log, AllOf(HasSubstr("\"ring\": true"), HasSubstr("\"errors\": {}")));
  }
  EXPECT_EQ(bench({"--ring=/nowhere"}).code, 3);
  EXPECT_EQ(bench({"--ring=" + path_, "--rate=10"}).code, 1);
  EXPECT_EQ(bench({"--ring_empty"}).code, 1);
}

TEST_F(RingE2eTest, SigtermEndsTheServerWithAnOpenRing) {
  const auto ring = Open();
  EXPECT_TRUE(ring->Run({}).status.ok());
  const ExitReport report = Stop();
  EXPECT_LT(report.took, absl::Seconds(10));
  EXPECT_EQ(access(path_.c_str(), F_OK), -1) << "the socket file stays";
}

}  // namespace
}  // namespace awqd
