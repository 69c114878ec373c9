// Composition fuzzer over the RPC: clients of both protocols call at the same time, with none, one
// or many tokens each, and every answer must have the bits that it has alone.
//
// Environment: AWQD_TEST_COMPOSITION_SECONDS, default 10.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "inference/grpc_service.grpc.pb.h"
#include "tests/e2e/server_test.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using client::Client;
using client::Tensor;
using client::WeightName;

constexpr int64_t kK = 64;
constexpr int kExperts = 5, kClients = 8;
constexpr char kGate[] = "moe.experts.*.gate_proj";

int64_t Seconds() {
  const char* text = std::getenv("AWQD_TEST_COMPOSITION_SECONDS");
  int64_t seconds = 0;
  return text != nullptr && absl::SimpleAtoi(text, &seconds) ? seconds : 10;
}

// The parts of an answer that a caller sees: status, shape and bits.
std::string Seen(const absl::Status& status, const Tensor* output) {
  if (!status.ok()) return status.ToString();
  return absl::StrCat(v1::DType_Name(output->dtype), " [", absl::StrJoin(output->shape, ", "), "] ",
                      output->bytes);
}

struct Caller {
  std::unique_ptr<Client> client;
  std::unique_ptr<inference::GRPCInferenceService::Stub> oip;
};

struct Call {
  std::string text;
  std::function<std::string(Caller&)> run;
  std::string alone;
};

class CompositionTest : public ServerTest {
 protected:
  void SetUp() override {
    std::filesystem::copy(DataPath("experts/moe"), repository_ / "moe");
    Start({"--batch_invariant"});
  }

  Caller NewCaller() const {
    return {server_->NewClient(), inference::GRPCInferenceService::NewStub(server_->NewChannel())};
  }

  int64_t Below(int64_t end) { return static_cast<int64_t>(random_() % end); }
  Tensor Random(v1::DType dtype, std::vector<int64_t> shape) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(Below(2000) - 1000) / 500;
    return *Tensor::FromFloats(dtype, std::move(shape), values);
  }
  Tensor Ids(int64_t tokens, int64_t top_k) {
    std::vector<int32_t> ids(tokens * top_k);
    const bool all_to_one = Below(4) == 0;
    const auto one = static_cast<int32_t>(Below(kExperts));
    for (int32_t& id : ids) id = all_to_one ? one : static_cast<int32_t>(Below(kExperts));
    Tensor out;
    out.dtype = v1::INT32;
    out.shape = {tokens, top_k};
    out.bytes.assign(reinterpret_cast<const char*>(ids.data()), ids.size() * 4);
    return out;
  }
  std::optional<client::Routing> Routed(int64_t tokens, int64_t top_k, bool summed) {
    client::Routing out = {Ids(tokens, top_k)};
    if (summed) out.router_weights = Random(v1::FP32, {tokens, top_k});
    return out;
  }

  static inference::ModelInferRequest Infer(const std::string& model) {
    inference::ModelInferRequest out;
    out.set_model_name(model);
    return out;
  }
  static void AddInput(const std::string& name, const std::string& datatype, const Tensor& tensor,
                       inference::ModelInferRequest* request) {
    auto* input = request->add_inputs();
    input->set_name(name);
    input->set_datatype(datatype);
    for (const int64_t size : tensor.shape) input->add_shape(size);
    request->add_raw_input_contents(tensor.bytes);
  }
  static std::string RunInfer(Caller& caller, const inference::ModelInferRequest& request) {
    grpc::ClientContext context;
    inference::ModelInferResponse response;
    const grpc::Status status = caller.oip->ModelInfer(&context, request, &response);
    if (!status.ok()) return status.error_message();
    const auto& shape = response.outputs(0).shape();
    return absl::StrCat(response.outputs(0).datatype(), " [", absl::StrJoin(shape, ", "), "] ",
                        response.raw_output_contents(0));
  }

  Call AnyCall() {
    // Few kinds, so that most calls find others to merge with.
    const int64_t kind = Below(6), sizes[] = {0, 0, 1, 1, 2, 3, 17};
    const int64_t tokens = sizes[Below(7)], top_k = 1 + Below(2);
    const bool summed = Below(2) == 0;
    const v1::DType dtype = Below(4) == 0 ? v1::FP32 : v1::FP16;
    const Tensor x = Random(dtype, {tokens, kK});
    const std::string text = absl::StrCat(tokens, " tokens, ", v1::DType_Name(dtype), ", top ",
                                          top_k, summed ? ", summed" : "");
    if (kind == 0) {
      client::MatmulCall call = {.weight = WeightName{"moe", "mlp.up_proj"}, .activations = x};
      return {"product, " + text, [call](Caller& caller) {
                const auto y = caller.client->QuantizedMatmul(call);
                return Seen(y.status(), y.ok() ? &y->output : nullptr);
              }};
    }
    if (kind == 1) {
      client::GroupedMatmulCall call = {.stack = WeightName{"moe", kGate},
                                        .activations = x,
                                        .routing = *Routed(tokens, top_k, summed)};
      return {"grouped product, " + text, [call](Caller& caller) {
                const auto y = caller.client->GroupedQuantizedMatmul(call);
                return Seen(y.status(), y.ok() ? &y->output : nullptr);
              }};
    }
    if (kind < 4) {
      client::GatedMlpCall call = {.activations = x};
      v1::GatedMlpRef mlp;
      mlp.set_model("moe");
      mlp.set_path(kind == 2 ? "moe.experts.*" : "mlp");
      call.mlp = mlp;
      if (kind == 2) call.routing = Routed(tokens, top_k, summed);
      return {absl::StrCat(kind == 2 ? "mlp of experts, " : "dense mlp, ", text),
              [call](Caller& caller) {
                const auto y = caller.client->GatedMlp(call);
                return Seen(y.status(), y.ok() ? &y->output : nullptr);
              }};
    }
    const std::string type = dtype == v1::FP32 ? "FP32" : "FP16";
    inference::ModelInferRequest request =
        Infer(kind == 4 ? absl::StrCat("moe/", kGate) : "moe/moe.experts.*:gated_mlp");
    if (kind == 5) {
      (*request.mutable_parameters())["activation_function"].set_string_param("SILU");
    }
    AddInput("x", type, x, &request);
    AddInput("ids", "INT32", Ids(tokens, top_k), &request);
    if (summed) {
      AddInput("router_weights", "FP32", Random(v1::FP32, {tokens, top_k}), &request);
    }
    return {"ModelInfer of " + request.model_name() + ", " + text,
            [request](Caller& caller) { return RunInfer(caller, request); }};
  }

  std::mt19937_64 random_{7};
};

TEST_F(CompositionTest, EveryAnswerIsWhatItIsAlone) {
  std::vector<Call> calls;
  for (int i = 0; i < 300; ++i) calls.push_back(AnyCall());
  // It stays: the others share its connection. gRPC 1.51 reads errno of a connect after it has
  // allocated, which in a new thread may change it: "127.0.0.1: No such file or directory".
  Caller first = NewCaller();
  for (Call& call : calls) {
    call.alone = call.run(first);
    ASSERT_EQ(call.alone.substr(0, 2), "FP") << call.text << ": " << call.alone;
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(Seconds());
  std::atomic<int64_t> answers{0}, wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back([&, i] {
      Caller caller = NewCaller();
      std::mt19937_64 random(100 + i);
      while (std::chrono::steady_clock::now() < until && wrong < 5) {
        const Call& call = calls[random() % calls.size()];
        const std::string got = call.run(caller);
        ++answers;
        if (got == call.alone) continue;
        ++wrong;
        // An error is shown as a whole, and the beginning of an answer.
        const size_t shown = got.starts_with("FP") ? 60 : got.size();
        ADD_FAILURE() << call.text << ": got " << got.substr(0, shown) << ", expected "
                      << call.alone.substr(0, 60);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%ld answers of %d clients\n", answers.load(), kClients);
  EXPECT_GT(answers, 100);
  Stop();
}

}  // namespace
}  // namespace awqd
