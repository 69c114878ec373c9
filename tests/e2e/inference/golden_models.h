// The golden checkpoints under tests/data: their places, the expected results, and the same weights
// as inline weights of requests.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "awqd/v1/tensor.pb.h"

namespace awqd {

struct GoldenCase {
  std::string folder;
  std::string format;  // of the checkpoints: the folder's name, unless cases.json says otherwise
  std::string model;   // the directory in the folder
  std::string weight;  // the path of a linear
  std::string scheme;  // "w8cs"
  int64_t k = 0, n = 0;
  std::string dequantized_fnv1a64;  // hash of the FP16 bytes [K, N]
  std::string activations;          // FP16 [tokens, K], .npy
  std::string matmul;               // float64 [tokens, N], bias included
  std::string quant_method;         // in the checkpoint's settings
  std::string factor;               // FP32 [K], .npy: what activations are multiplied by; or empty
  // INT8 [tokens, K] and INT32 [tokens, N], .npy; empty for a weight without integer products.
  std::string int8_activations, int8_matmul;
  std::string settings;  // JSON for a request, if the checkpoint does not have them; else empty
  int64_t hadamard_size = 0;  // of a transform of activations; 0: none
  std::string whole;          // FP32 [K, N], .npy, of one: what activations are multiplied by
  std::string weight_format;  // of the linear, because a checkpoint may have several formats

  std::string Folder() const;
  // "plain.w4-groups.layer", for names of tests.
  std::string Name() const { return folder + "." + model + "." + weight; }
};

inline void PrintTo(const GoldenCase& golden, std::ostream* out) { *out << golden.Name(); }

std::vector<GoldenCase> GoldenCases(const std::string& folder);

// The case's linear as an inline weight, with the settings of its checkpoint.
v1::PackedWeight InlineOf(const GoldenCase& golden);

}  // namespace awqd
