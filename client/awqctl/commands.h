// The flags of awqctl, as its command line gives them, and its subcommands. Each of these writes its
// result to the console's `out` and returns an exit code, with one line on `err` when it is not kOk.
// RunAwqctl makes such a line and an exit code of an error: kFileFailed for a command that calls no
// server, else kCallFailed or kCannotConnect. FileFailed and BadArguments choose another exit code.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/awqctl/console.h"
#include "client/awqd_client.h"
#include "client/bench/plan.h"
#include "client/shared_memory.h"
#include "client/tools/quantize.h"
#include "google/protobuf/message.h"

namespace awqd::awqctl {

// Exit codes, as --help and client/README.md state them. healthcheck's are grpc_health_probe's.
inline constexpr int kOk = 0;
inline constexpr int kBadArguments = 1;
inline constexpr int kDiffers = 1;      // compare, diff
inline constexpr int kDoesNotLoad = 1;  // inspect
inline constexpr int kCannotConnect = 2;
inline constexpr int kCallFailed = 3;
inline constexpr int kNotServing = 4;
inline constexpr int kFileFailed = 5;

struct BenchFlags {
  bench::Plan plan;
  bool shared_memory = false;
  std::string svg;        // file to write, empty: none
  std::string json_file;  // likewise
};

// inspect, diff, quantize, convert, merge
struct ToolFlags {
  std::string folder;
  std::string other;  // diff: the second folder; merge: the adapter
  int64_t worst = 3;
  // quantize, convert, merge
  std::string output;
  std::string to;
  int bits = 4;
  int64_t group_size = tools::kGroupSizeOfTarget;
  bool symmetric = false;
  bool search = false;
  std::vector<std::string> leave_out;
  std::string dtype;  // as safetensors spells it; empty: the model's
  bool verify = false;
};

// A mixture's router: files, and what client::Router has.
struct RouterFlags {
  std::string logits;  // empty: there is none
  std::string correction_bias;
  v1::RouterScoring scoring = v1::SOFTMAX;
  int32_t n_group = 0, topk_group = 0;
  bool norm_topk_prob = false;
  float routed_scaling_factor = 1;
};

struct TokenFlags {
  std::string name;
  std::string roles;   // "infer,read"
  std::string out;     // file to make of the token, empty: stdout
  std::string append;  // file that gets the line, empty: stderr
};

struct Flags;
// Runs a command whose flags were read. The beginning of this file says how it ends.
using Command = absl::StatusOr<int>(const Flags& flags, client::Client& client, Console& console);
// The same for a command that calls no server.
using LocalCommand = absl::StatusOr<int>(const Flags& flags, Console& console);

struct Flags {
  std::variant<Command*, LocalCommand*> command;

  std::string address = "127.0.0.1:8001";
  client::Security security;
  std::optional<absl::Duration> timeout;  // none: the command's own default
  bool json = false;

  std::string model;
  std::string weight;
  bool require_all_weights = false;  // load
  // dequantize, matmul
  std::string output;
  client::DType dtype = v1::DTYPE_UNSPECIFIED;
  client::DType output_dtype = v1::DTYPE_UNSPECIFIED;
  // dequantize
  int64_t row_begin = 0, row_end = 0, column_begin = 0, column_end = 0;
  bool quiet = false;
  bool shared_memory = false;  // dequantize, matmul, mlp
  // matmul, mlp
  std::string input;
  std::string bias;
  std::optional<int64_t> random_tokens;
  uint64_t seed = 1;
  v1::Path path = v1::AUTO;
  v1::ActivationFunction activation_function = v1::NONE;
  // matmul and mlp of experts
  std::string expert_ids;
  std::string router_weights;
  std::optional<int64_t> top_k;
  RouterFlags router;
  // mlp
  v1::ActivationParameters activation_parameters;
  std::string gate_bias, up_bias, down_bias;
  std::string shared_expert, shared_expert_gate;
  // Paths of projections that are not called <weight>.gate_proj and so on.
  std::string gate, up, down;
  client::DType scale_dtype = v1::DTYPE_UNSPECIFIED;  // quantize-kv
  v1::ActivationQuantization quantize_activations = v1::ACTIVATIONS_AS_SENT;
  std::optional<double> activation_scale, down_activation_scale;
  std::string activation_scales, down_activation_scales;  // at most one of each two is given
  // kernels
  bool markdown = false;
  bool wide = false;
  // compare
  std::string actual;
  std::string expected;
  std::optional<double> max_relative_error;
  bool bit_exact = false;  // exactly one of the two is given
  // healthcheck
  std::string service;
  absl::Duration wait;
  // top
  absl::Duration interval = absl::Seconds(1);
  int64_t screens = 0;  // 0: until a signal
  // bench
  BenchFlags bench;
  ToolFlags tool;
  TokenFlags token;
};

// The flags, or nullopt with `exit_code` set after help went to `out` or one line to `err`.
// args[0] is the first argument, not the program's name.
std::optional<Flags> ParseFlags(const std::vector<std::string>& args, std::ostream& out,
                                std::ostream& err, int& exit_code);

// The subcommands.
Command Status, Models, Load, Unload, Kernels, Dequantize, Matmul, Mlp, QuantizeKv, Top,
    Healthcheck, Bench;
LocalCommand Compare, Inspect, Diff, Quantize, Convert, Merge, Token;

// Parses, connects and runs. The whole of main, so that tests can call it.
int RunAwqctl(const std::vector<std::string>& args, Console& console);

// The same error, with an exit code of its own. OK stays OK.
absl::Status FileFailed(absl::Status status);
absl::Status BadArguments(absl::Status status);

// The command's deadline: --timeout, or `otherwise` without it.
client::CallOptions Deadline(const Flags& flags, absl::Duration otherwise = absl::Seconds(60));

// The weight, stack or MLP of a product, as the server describes it.
struct ProductTarget {
  int64_t k = 0;
  int64_t n = 0;
  int64_t experts = 0;  // 0: one weight
};
// A weight, or a stack.
absl::StatusOr<ProductTarget> FindWeight(const Flags& flags, client::Client& client,
                                         const client::WeightName& wanted, bool stack);
// `first` and `last`: paths of the weights or stacks that the activations go to and that the answer
// comes from. The two are one path but for an MLP.
absl::StatusOr<ProductTarget> FindTarget(const Flags& flags, client::Client& client,
                                         const std::string& model, const std::string& first,
                                         const std::string& last);

// For --shared_memory: the prefix that the server asks for, FAILED_PRECONDITION when it takes none,
// and an object with it.
absl::StatusOr<std::string> SharedMemoryPrefix(const Flags& flags, client::Client& client);
absl::StatusOr<client::SharedMemory> CreateSharedMemory(const Flags& flags, client::Client& client,
                                                        int64_t bytes);

// For quantize, convert and merge, a tools::Guard: a signal that ends the process removes the path.
std::shared_ptr<void> RemovedOnSignal(const std::string& path);

// Protocol Buffers' JSON mapping with the names of the .proto files and no field left out.
std::string ToJson(const google::protobuf::Message& message);

// "w4g128z: 4-bit codes, ..." and a line end for each of `schemes` that is a quantization scheme.
std::string SchemeLines(const std::set<std::string>& schemes);

// "fused", "dequantize" or "auto".
std::string PathName(v1::Path path);

}  // namespace awqd::awqctl
