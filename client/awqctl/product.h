// What matmul and mlp share: operands from files or drawn at random, one call, what ran and how
// fast.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "client/awqctl/commands.h"

namespace awqd::awqctl {

// A .npy file, converted to `dtype` unless that is unspecified.
absl::StatusOr<client::Tensor> ReadTensor(const std::string& path, client::DType dtype);

// All or nothing; BF16 as FP32, which holds it exactly.
absl::Status WriteNpy(const std::string& path, const client::Tensor& output);

// The weights or stacks that the activations go to and that the answer comes from, by their paths.
struct ProductPaths {
  std::string first;
  std::string last;
};

// True for the path of a stack of experts.
bool IsStack(const std::string& path);

// Of an MLP whose projections have this path in common.
inline ProductPaths PathsOfMlp(const std::string& path) {
  return {path + ".gate_proj", path + ".down_proj"};
}

// What a product multiplies by, as the server tells it.
struct ProductTarget {
  int64_t k = 0;
  int64_t n = 0;
  int64_t experts = 0;  // 0: one weight
};
absl::StatusOr<ProductTarget> FindTarget(const Flags& flags, client::Client& client,
                                         const std::string& model, const ProductPaths& paths);

struct Operands {
  client::Tensor activations;
  std::optional<client::Routing> routing;
  std::optional<v1::SharedMemory> shared_activations, shared_output;
};
using SendProduct = std::function<absl::StatusOr<client::MatmulResult>(Operands operands)>;

// Reads or draws the operands, sends them, prints what ran and writes the answer; an exit code.
int RunProduct(const Flags& flags, client::Client& client, Console& console,
               const ProductPaths& paths, const SendProduct& send);

}  // namespace awqd::awqctl
