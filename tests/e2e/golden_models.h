// The golden checkpoints under tests/data: where they are, what must come out, and the same weights
// as a request carries them.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "awqd/v1/tensor.pb.h"

namespace awqd {

struct GoldenCase {
  std::string folder;
  std::string format;  // of its checkpoints: the folder's name, but where cases.json says another
  std::string model;   // the directory in it
  std::string weight;  // the path of a linear
  std::string description;  // "w8cs"
  int64_t k = 0, n = 0;
  std::string dequantized_fnv1a64;  // of the FP16 bytes [K, N]
  std::string activations;          // FP16 [tokens, K], .npy
  std::string matmul;               // float64 [tokens, N], bias included
  std::string quant_method;         // of the checkpoint's settings
  std::string factor;               // FP32 [K], .npy: what activations are multiplied by; or empty
  // INT8 [tokens, K] and INT32 [tokens, N], .npy; empty for a weight that is no integers.
  std::string int8_activations, int8_matmul;
  std::string settings;  // JSON; of a request, where the checkpoint's do not say them; else empty
  std::string weight_format;  // of the linear, which a checkpoint may have several of

  std::string Folder() const;
  // "plain.w4-groups.layer", for names of tests.
  std::string Name() const { return folder + "." + model + "." + weight; }
};

inline void PrintTo(const GoldenCase& golden, std::ostream* out) { *out << golden.Name(); }

std::vector<GoldenCase> GoldenCases(const std::string& folder);

// The tensors of the case's linear and the settings of its checkpoint as an inline weight.
v1::PackedWeight InlineOf(const GoldenCase& golden);

}  // namespace awqd
