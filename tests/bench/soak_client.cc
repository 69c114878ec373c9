// Mixed calls on a running server from several threads until it is killed: products one by one and
// on a stream, with weights by name and carried in the request, of experts and of gated MLPs,
// blocks of weights in one message and as a stream, key/value caches, some cancelled by a short
// deadline.
//   awqd_soak_client <address> <model>[,<model>...] <threads> <seed>
// Ends by itself, with exit code 1, when a call fails in a way that no healthy server makes it
// fail.
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "client/awqd_client.h"
#include "client/bench/payload.h"

namespace awqd::bench {
namespace {

using client::Client;

struct Weight {
  client::WeightName name;
  int64_t k = 0, n = 0, experts = 0;
};

// The shape of inline weights.
constexpr int64_t kInlineK = 256, kInlineN = 512, kInlineGroup = 128;
constexpr int kInlineExperts = 3;

class Soak {
 public:
  Soak(Client* client, std::vector<Weight> weights, std::vector<Weight> stacks)
      : client_(client), weights_(std::move(weights)), stacks_(std::move(stacks)) {}

  // Makes one random call; returns false after an answer that a server must never give.
  bool Once(std::mt19937_64& random) {
    const Weight& weight = weights_[random() % weights_.size()];
    switch (random() % 12) {
      case 0:
        return Expected(DequantizeBlock(weight, random));
      case 1:
        return Expected(DequantizeWhole(weight, random));
      case 2:
        return Expected(Stream(weight, random));
      case 3:
        return Expected(client_->QuantizedMatmul(Inline(random), Limit(random)).status());
      case 4:
        return Expected(Kv(random));
      case 5:
        return Expected(client_->GroupedQuantizedMatmul(Grouped(random), Limit(random)).status());
      case 6:
        return Expected(client_->GatedMlp(InlineMlp(random), Limit(random)).status());
      default:
        return Expected(client_->QuantizedMatmul(Call(weight, random), Limit(random)).status());
    }
  }

 private:
  static client::CallOptions Limit(std::mt19937_64& random) {
    // One in eight is cancelled while it waits or runs.
    if (random() % 8 != 0) return {.timeout = absl::Seconds(60)};
    return {.timeout = absl::Microseconds(200 + random() % 5000)};
  }

  static client::MatmulCall Call(const Weight& weight, std::mt19937_64& random) {
    static constexpr int64_t kTokens[] = {1, 1, 1, 2, 7, 16, 64, 300};
    client::MatmulCall call;
    call.weight = weight.name;
    call.activations = Tokens(kTokens[random() % std::size(kTokens)], weight.k, random);
    return call;
  }

  static client::Tensor Tokens(int64_t tokens, int64_t k, std::mt19937_64& random) {
    const v1::DType dtype = random() % 2 == 0 ? v1::FP16 : v1::BF16;
    client::Tensor tensor{dtype, {tokens, k}, std::string(tokens * k * 2, '\0')};
    // 0x3c00 to 0x3cff: near 1 in FP16, small in BF16.
    for (size_t i = 0; i < tensor.bytes.size(); i += 2) {
      tensor.bytes[i] = static_cast<char>(i * 31);
      tensor.bytes[i + 1] = 0x3c;
    }
    return tensor;
  }

  static v1::PackedWeight Packed(int64_t k, int64_t n) {
    v1::PackedWeight packed;
    packed.set_group_size(kInlineGroup);
    const auto fill = [](v1::Tensor* tensor, v1::DType dtype, int64_t rows, int64_t columns,
                         const std::string& element) {
      tensor->set_dtype(dtype);
      tensor->add_shape(rows);
      tensor->add_shape(columns);
      std::string* const raw = tensor->mutable_raw();
      for (int64_t i = 0; i < rows * columns; ++i) *raw += element;
    };
    fill(packed.mutable_qweight(), v1::INT32, k, n / 8, "\x12\x34\x56\x78");
    fill(packed.mutable_qzeros(), v1::INT32, k / kInlineGroup, n / 8, "\x21\x43\x65\x07");
    fill(packed.mutable_scales(), v1::FP16, k / kInlineGroup, n, std::string("\x00\x1c", 2));
    return packed;
  }

  static client::MatmulCall Inline(std::mt19937_64& random) {
    client::MatmulCall call;
    call.weight = Packed(kInlineK, kInlineN);
    call.activations = Tokens(1 + static_cast<int64_t>(random() % 4), kInlineK, random);
    return call;
  }

  static client::Routing Routed(int64_t tokens, int64_t experts, std::mt19937_64& random) {
    client::Routing out = *RandomRouting(tokens, 2, experts, random());
    if (random() % 2 == 0) out.router_weights.reset();
    return out;
  }

  client::GroupedMatmulCall Grouped(std::mt19937_64& random) const {
    static constexpr int64_t kTokens[] = {1, 2, 9, 64};
    const int64_t tokens = kTokens[random() % std::size(kTokens)];
    if (stacks_.empty()) {
      v1::PackedStack packed;
      for (int e = 0; e < kInlineExperts; ++e) *packed.add_experts() = Packed(kInlineK, kInlineN);
      return {.stack = packed,
              .activations = Tokens(tokens, kInlineK, random),
              .routing = Routed(tokens, kInlineExperts, random)};
    }
    const Weight& stack = stacks_[random() % stacks_.size()];
    return {.stack = stack.name,
            .activations = Tokens(tokens, stack.k, random),
            .routing = Routed(tokens, stack.experts, random)};
  }

  static client::GatedMlpCall InlineMlp(std::mt19937_64& random) {
    v1::PackedGatedMlp packed;
    const int experts = random() % 2 == 0 ? kInlineExperts : 1;
    for (int e = 0; e < experts; ++e) {
      *packed.mutable_gate()->add_experts() = Packed(kInlineK, kInlineN);
      *packed.mutable_up()->add_experts() = Packed(kInlineK, kInlineN);
      *packed.mutable_down()->add_experts() = Packed(kInlineN, kInlineK);
    }
    const int64_t tokens = 1 + static_cast<int64_t>(random() % 4);
    client::GatedMlpCall call = {.mlp = packed, .activations = Tokens(tokens, kInlineK, random)};
    if (experts > 1) call.routing = Routed(tokens, experts, random);
    return call;
  }

  // Quantises a block to codes, and dequantises it.
  absl::Status Kv(std::mt19937_64& random) {
    client::Tensor block = Tokens(1 + static_cast<int64_t>(random() % 64), 8 * 128, random);
    block.shape = {block.shape[0], 8, 128};
    const auto stored = client_->QuantizeKv({.block = std::move(block)}, Limit(random));
    if (!stored.ok()) return stored.status();
    return client_
        ->DequantizeKv({.codes = stored->codes, .scales = *stored->scales, .zeros = *stored->zeros},
                       Limit(random))
        .status();
  }

  absl::Status DequantizeBlock(const Weight& weight, std::mt19937_64& random) {
    client::DequantizeCall call;
    call.weight = weight.name;
    call.row_begin = static_cast<int64_t>(random() % static_cast<uint64_t>(weight.k - 8));
    call.row_end = call.row_begin + 8;
    return client_->Dequantize(call, Limit(random)).status();
  }

  absl::Status DequantizeWhole(const Weight& weight, std::mt19937_64& random) {
    client::DequantizeCall call;
    call.weight = weight.name;
    call.output_dtype = random() % 2 == 0 ? v1::FP16 : v1::FP32;
    const bool stop_early = random() % 4 == 0;
    const auto sink = [stop_early](client::DequantizeBlock) {
      return stop_early ? absl::CancelledError("enough") : absl::OkStatus();
    };
    return client_->DequantizeBlocks(call, sink, Limit(random)).status();
  }

  absl::Status Stream(const Weight& weight, std::mt19937_64& random) {
    const auto stream = client_->QuantizedMatmulStream(Limit(random));
    const int count = 1 + static_cast<int>(random() % 24);
    for (int i = 0; i < count; ++i) {
      if (!stream->Send(Call(weight, random)).ok()) break;
    }
    if (random() % 4 == 0) return absl::OkStatus();  // dropped with answers on their way
    stream->CloseSend().IgnoreError();
    while (true) {
      auto answer = stream->Receive();
      if (!answer.ok()) return answer.status();
      if (!answer->has_value()) return absl::OkStatus();
    }
  }

  // A server under this load may be late or full, but must not fail otherwise.
  static bool Expected(const absl::Status& status) {
    if (status.ok() || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status) ||
        absl::IsResourceExhausted(status)) {
      return true;
    }
    std::cerr << "soak: " << status << "\n";
    return false;
  }

  Client* const client_;
  const std::vector<Weight> weights_, stacks_;
};

absl::StatusOr<std::vector<Weight>> WeightsOf(Client& client, const std::string& models,
                                              std::vector<Weight>* stacks) {
  std::vector<Weight> weights;
  for (const std::string& model : std::vector<std::string>(absl::StrSplit(models, ','))) {
    const auto answer = client.GetModel(model);
    if (!answer.ok()) return answer.status();
    for (const v1::WeightInfo& weight : answer->weights()) {
      weights.push_back({{model, weight.path()}, weight.k(), weight.n()});
    }
    for (const v1::StackInfo& stack : answer->stacks()) {
      stacks->push_back({{model, stack.path()}, stack.k(), stack.n(), stack.experts()});
    }
  }
  return weights;
}

int Run(const std::string& address, const std::string& models, int threads, uint64_t seed) {
  auto client = Client::Create({.address = address});
  if (!client.ok()) {
    std::cerr << client.status() << "\n";
    return 1;
  }
  std::vector<Weight> stacks;
  auto weights = WeightsOf(**client, models, &stacks);
  if (!weights.ok() || weights->empty()) {
    std::cerr << "soak: no weights: " << weights.status() << "\n";
    return 1;
  }
  Soak soak(client->get(), *std::move(weights), std::move(stacks));
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) {
    pool.emplace_back([&soak, seed, t] {
      std::mt19937_64 random(seed * 1000 + static_cast<uint64_t>(t));
      while (soak.Once(random)) {
      }
      _exit(1);
    });
  }
  for (std::thread& thread : pool) thread.join();
  return 1;
}

}  // namespace
}  // namespace awqd::bench

int main(int argc, char** argv) {
  const int threads = argc == 5 ? std::atoi(argv[3]) : 0;
  if (threads < 1) {
    std::cerr << "usage: awqd_soak_client <address> <model>[,<model>...] <threads> <seed>\n";
    return 2;
  }
  return awqd::bench::Run(argv[1], argv[2], threads, std::strtoull(argv[4], nullptr, 10));
}
