// Calls of the weight "layer" of SyntheticAwq::Write, and comparisons of answers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "awqd/v1/inference.pb.h"
#include "client/awqd_client.h"

namespace awqd {

// A product of one token of `k` halves, all 0.5.
client::MatmulCall OneToken(const std::string& model = "m", int64_t k = 256);
// Tokens [tokens, k] of numbers in [-1, 1) times weight "layer" of model "m", by one kernel for every
// batch, so that bits can be compared.
client::MatmulCall LayerCall(int64_t tokens, int64_t k, v1::DType dtype);

// A product of zeros, FP16 [tokens, k], with the weight "layer" of "m".
v1::QuantizedMatmulRequest ProductOfZeros(int64_t tokens, int64_t k);

// The whole file, which must be there.
client::Tensor ReadTensor(const std::string& npy);

// The norm of the difference relative to the norm of `expected`; infinite where the numbers of
// elements differ.
double RelativeError(const client::Tensor& got, const std::vector<double>& expected);

// FNV-1a of 64 bits, in 16 hexadecimal digits.
std::string Fnv1a64(const std::string& bytes);

}  // namespace awqd
