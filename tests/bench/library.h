// libawqd as its users have it: weights are packed from tensors and multiplied through awqd.h. An
// error ends the program.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/weight.h"
#include "tests/bench/bench.h"
#include "tests/kernels/library/owned.h"

namespace awqd::bench {

// The library's device beside the bench's own. Memory of activations and workspaces is the bench's.
class Library {
 public:
  Library(const std::string& device, bool batch_invariant, Machine& machine);

  // Packs a weight of integer codes `count` times, as format "plain".
  std::vector<testing::WeightPtr> Pack(const HostWeight& weight, size_t count) const;
  // So much memory for its kernels, ready for the first call.
  Buffer MakeWorkspace(int64_t bytes) const;
  Machine& machine() const { return machine_; }

 private:
  Machine& machine_;
  testing::DevicePtr device_;
};

// Copies of a weight.
class LibraryWeights {
 public:
  LibraryWeights(const Library& library, const HostWeight& weight, size_t copies);

  // Computes what `args` say by copy `i` modulo their number, whatever weight and workspace `args` have.
  void Multiply(int i, const MatmulArgs& args, Path path, StreamView stream);
  void Decode(int i, const DequantizeArgs& args, StreamView stream);

 private:
  void Reserve(int64_t bytes);

  const Library& library_;
  std::vector<testing::WeightPtr> weights_;
  std::tuple<int64_t, DType, ActivationQuantization> sized_for_;
  Buffer workspace_;
};

// Gated MLPs of experts that choose and sum by router weights.
class LibraryExperts {
 public:
  // `gate_and_up`: of each expert's two weights; all experts are equal, in memory of their own.
  LibraryExperts(const Library& library, size_t experts, const HostWeight& gate_and_up,
                 const HostWeight& down);

  // y [M, hidden] = sum over j of router_weights[t, j] down(silu(gate(x)) up(x)) of expert
  // ids[t, j], as `x` and `y` say; pointers of the device.
  void Multiply(const ConstMatrixView& x, const int32_t* ids, const float* router_weights,
                int64_t top_k, ActivationQuantization quantization, const MatrixView& y,
                StreamView stream);

 private:
  const Library& library_;
  testing::StackPtr gate_, up_, down_;
  Buffer workspace_;
  int64_t sized_for_ = -1;  // tokens
};

}  // namespace awqd::bench
