// What the command line of awqctl says.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "client/awqctl/console.h"
#include "client/awqd_client.h"
#include "client/bench/plan.h"

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

// inspect, diff, quantize, convert
struct ToolFlags {
  std::string folder;
  std::string other;  // diff: the second folder
  int64_t worst = 3;
  // quantize, convert; `to` of both
  std::string output;
  std::string to;
  int bits = 4;
  int64_t group_size = 128;
  bool symmetric = false;
  bool search = false;
  std::vector<std::string> leave_out;
  std::string dtype;  // as safetensors spells it; empty: the model's
  bool verify = false;
};

struct TokenFlags {
  std::string name;
  std::string roles;  // "infer,read"
};

struct Flags;
// What a command does after its flags were read; its exit code.
using Command = int(const Flags& flags, client::Client& client, Console& console);
// The same of a command that asks no server.
using LocalCommand = int(const Flags& flags, Console& console);

struct Flags {
  Command* command = nullptr;  // one of the two is set
  LocalCommand* local_command = nullptr;

  std::string address = "127.0.0.1:8001";
  client::Security security;
  std::optional<absl::Duration> timeout;  // none: the command's own default
  bool json = false;

  std::string model;
  std::string weight;
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
  // mlp: paths of projections that are not called <weight>.gate_proj and so on
  std::string gate, up, down;
  client::DType scale_dtype = v1::DTYPE_UNSPECIFIED;  // quantize-kv
  v1::ActivationQuantization quantize_activations = v1::ACTIVATIONS_AS_SENT;
  std::optional<double> activation_scale;  // at most one of the two is given
  std::string activation_scales;
  // kernels
  bool markdown = false;
  // compare
  std::string actual;
  std::string expected;
  std::optional<double> max_relative_error;
  bool bit_exact = false;  // exactly one of the two is given
  // healthcheck
  std::string service;
  absl::Duration wait;
  // top
  double interval_s = 1;
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

}  // namespace awqd::awqctl
