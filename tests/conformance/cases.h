// The cases of the conformance tests: schemes of weights, counts of tokens, rows of the
// registry; and a product in guarded memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/kernels.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/test_device.h"

namespace awqd::testing {

struct Shape {
  int64_t k, n;
  const char* scheme;  // as ToString prints it
  int64_t max_m;
};

// More with AWQD_TEST_FULL=1.
std::vector<Shape> Shapes();

// For activations that are rounded to E4M3.
std::vector<Shape> Float8Shapes();

// 0, 1, 2, ... and the counts around the borders of kernels, up to max_m.
std::vector<int64_t> TokenCounts(int64_t max_m);

HostWeight MakeWeight(const Shape& shape, Scales scales, bool bias, uint64_t seed);

// A row of the registry and a shape.
using Param = std::tuple<const KernelRow*, Shape>;
std::string ParamName(const ::testing::TestParamInfo<Param>& info);
// Letters, digits and underscores.
std::string Plain(std::string text);

std::vector<const KernelRow*> RowsOf(Op op);
std::vector<const KernelRow*> BatchInvariantRows();

// Whether the row serves m tokens; for none it computes nothing.
bool Serves(const KernelRow& row, int64_t m);

// The quantisation of activations: `scales` of MatmulArgs, one for each token or none.
struct Quantized {
  ActivationQuantization how = ActivationQuantization::kNone;
  std::vector<float> scales;
};

struct Product {
  std::vector<uint8_t> y;
  const KernelRow* ran = nullptr;
};

// Products by one row, for which `weight` was prepared.
class Bench {
 public:
  Bench(const KernelRow& row, std::shared_ptr<const DeviceWeight> weight)
      : row_(row), weight_(std::move(weight)) {}

  // The product of m rows of x. The memory around x, y and the workspace is checked, and `repeats`
  // runs must give the same bits.
  Product Run(const std::vector<uint8_t>& x, DType in, DType out, int64_t m, int repeats = 1,
              ActivationFunction activation = ActivationFunction::kNone,
              const Quantized& quantized = {});

 private:
  const KernelRow& row_;
  std::shared_ptr<const DeviceWeight> weight_;
};

class Conformance : public ::testing::TestWithParam<Param> {
 protected:
  const KernelRow& row() const { return *std::get<0>(GetParam()); }
  const Shape& shape() const { return std::get<1>(GetParam()); }

  // Prepares the weight for the row; returns the reason if the row cannot serve it.
  std::string Prepare(const HostWeight& weight);

  std::shared_ptr<const DeviceWeight> prepared_;
};

}  // namespace awqd::testing
