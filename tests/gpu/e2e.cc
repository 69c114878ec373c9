// Drives a running server that holds the checkpoint of make_llama_layer with mixed requests from
// many threads, and checks sampled elements of every answer against the definition:
//   gpu_e2e <address> <model> <requests> <threads>
// Exit code 0 only when every request succeeded and every sampled element was right.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/awqd_client.h"
#include "kernels/base/half.h"
#include "tests/gpu/llama_layer.h"

namespace awqd::testing {
namespace {

using client::Client;
using client::Tensor;

constexpr int kSamples = 16;

// The weight as the products use it: (q - z) * s, rounded once to FP16.
double WeightAt(int linear, int64_t k, int64_t n) {
  const LayerLinear& l = LlamaLayer()[linear];
  const int64_t group = k / kLayerGroup;
  const int q = AwqNibble(LayerWord(linear, LayerPart::kCodes, k * (l.n / 8) + n / 8), n);
  const int z = AwqNibble(LayerWord(linear, LayerPart::kZeros, group * (l.n / 8) + n / 8), n);
  // 5 bits times 11 bits is exact in float.
  const float exact = static_cast<float>(q - z) * HalfToFloat(LayerScale(linear, group * l.n + n));
  return HalfToFloat(FloatToHalf(exact));
}

double ElementOf(const Tensor& tensor, int64_t index) {
  if (tensor.dtype == v1::FP32) {
    float value;
    std::memcpy(&value, tensor.bytes.data() + index * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, tensor.bytes.data() + index * 2, 2);
  return tensor.dtype == v1::FP16 ? HalfToFloat(bits) : Bf16ToFloat(bits);
}

// Values of magnitude 1/8 to 1, both signs.
Tensor RandomTokens(v1::DType dtype, int64_t m, int64_t k, uint64_t seed) {
  Tensor out{dtype, {m, k}, std::string(m * k * 2, '\0')};
  auto* const bits = reinterpret_cast<uint16_t*>(out.bytes.data());
  for (int64_t i = 0; i < m * k; ++i) {
    const uint64_t r = Mix(seed + static_cast<uint64_t>(i));
    const uint16_t magnitude = dtype == v1::FP16 ? 0x3000 + r % 0xc00 : 0x3e00 + r % 0x180;
    bits[i] = static_cast<uint16_t>(magnitude | (r >> 63 << 15));
  }
  return out;
}

// Returns "", or the error. The limit is a fraction of the norm of the terms plus the output's own
// rounding: BF16 weights are rounded to 8 bits, FP16 ones not at all.
std::string CheckProduct(int linear, const Tensor& x, const Tensor& y, uint64_t seed) {
  const LayerLinear& l = LlamaLayer()[linear];
  const int64_t m = x.shape[0];
  if (y.shape != std::vector<int64_t>{m, l.n} || y.dtype != x.dtype) return "shape or dtype";
  const bool fp16 = x.dtype == v1::FP16;
  for (int s = 0; s < kSamples; ++s) {
    const int64_t row = static_cast<int64_t>(Mix(seed + 2 * s) % m);
    const int64_t col = static_cast<int64_t>(Mix(seed + 2 * s + 1) % l.n);
    double want = 0, norm = 0;
    for (int64_t k = 0; k < l.k; ++k) {
      const double term = ElementOf(x, row * l.k + k) * WeightAt(linear, k, col);
      want += term;
      norm += term * term;
    }
    const double limit =
        (fp16 ? 1e-3 : 8e-3) * std::sqrt(norm) + std::abs(want) * (fp16 ? 0x1p-10 : 0x1p-7);
    const double got = ElementOf(y, row * l.n + col);
    if (!(std::abs(got - want) <= limit)) {
      return absl::StrCat("element [", row, ", ", col, "]: got ", got, ", expected ", want,
                          " within ", limit);
    }
  }
  return "";
}

std::string CheckDequantize(int linear, Client& client, const std::string& model, uint64_t seed) {
  const LayerLinear& l = LlamaLayer()[linear];
  client::DequantizeCall call;
  call.weight = client::WeightName{model, l.path};
  call.row_begin = static_cast<int64_t>(Mix(seed) % (l.k - 16));
  call.row_end = call.row_begin + 9;
  const auto answer = client.Dequantize(call);
  if (!answer.ok()) return answer.status().ToString();
  if (answer->output.shape != std::vector<int64_t>{9, l.n}) return "shape";
  for (int64_t i = 0; i < 9 * l.n; ++i) {
    const double want = WeightAt(linear, call.row_begin + i / l.n, i % l.n);
    if (ElementOf(answer->output, i) != want) return absl::StrCat("element ", i, " differs");
  }
  return "";
}

// Mostly decode steps, some prefill; every path and 16-bit dtype.
int64_t TokensOf(uint64_t r) {
  static constexpr int64_t kFew[] = {1, 1, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17};
  static constexpr int64_t kSome[] = {31, 33, 63, 64, 65, 100, 128};
  static constexpr int64_t kMany[] = {255, 256, 257, 511};
  if (r % 100 < 90) return kFew[r / 100 % std::size(kFew)];
  if (r % 100 < 98) return kSome[r / 100 % std::size(kSome)];
  return kMany[r / 100 % std::size(kMany)];
}

std::string OneRequest(Client& client, const std::string& model, uint64_t seed) {
  const uint64_t r = Mix(seed);
  const int linear = static_cast<int>(r % LlamaLayer().size());
  const LayerLinear& l = LlamaLayer()[linear];
  if (seed % 100 == 99) return CheckDequantize(linear, client, model, r);
  const v1::DType dtype = (r >> 8) % 3 == 0 ? v1::BF16 : v1::FP16;
  const Tensor x = RandomTokens(dtype, TokensOf(r >> 16), l.k, r);
  client::MatmulCall call;
  call.weight = client::WeightName{model, l.path};
  call.activations = x;
  static constexpr v1::Path kPaths[] = {v1::AUTO, v1::AUTO, v1::FUSED, v1::DEQUANTIZE};
  call.path = kPaths[(r >> 40) % std::size(kPaths)];
  const auto answer = client.QuantizedMatmul(std::move(call));
  if (!answer.ok()) return answer.status().ToString();
  const std::string wrong = CheckProduct(linear, x, answer->output, r);
  if (wrong.empty()) return "";
  return absl::StrCat(l.path, ", M ", x.shape[0], ", ", client::Name(dtype), ", ",
                      answer->execution.ShortDebugString(), ": ", wrong);
}

int Run(const std::string& address, const std::string& model, int requests, int threads) {
  auto client = Client::Create({.address = address});
  if (!client.ok()) {
    std::cerr << client.status() << "\n";
    return 1;
  }
  std::atomic<int> next = 0, wrong = 0;
  std::mutex print;
  const auto work = [&] {
    for (int i = next++; i < requests; i = next++) {
      const std::string why = OneRequest(**client, model, static_cast<uint64_t>(i));
      if (why.empty()) continue;
      if (++wrong > 10) continue;
      std::lock_guard<std::mutex> lock(print);
      std::cerr << "request " << i << ": " << why << "\n";
    }
  };
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) pool.emplace_back(work);
  for (std::thread& thread : pool) thread.join();
  std::cout << requests << " requests, " << wrong << " wrong\n";
  return wrong == 0 && requests > 0 ? 0 : 1;
}

}  // namespace
}  // namespace awqd::testing

int main(int argc, char** argv) {
  const int requests = argc == 5 ? std::atoi(argv[3]) : 0;
  const int threads = argc == 5 ? std::atoi(argv[4]) : 0;
  if (requests < 1 || threads < 1) {
    std::cerr << "usage: gpu_e2e <address> <model> <requests> <threads>\n";
    return 2;
  }
  return awqd::testing::Run(argv[1], argv[2], requests, threads);
}
