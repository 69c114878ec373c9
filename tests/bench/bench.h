// The bench harness: cases from the registry, timings over cold weights, floors of the same run.
//
// bench_main.cc walks rows and shapes; a Machine knows how a device is timed and what its floors
// are. bench_cpu.cc has the CPU's; a CUDA Machine belongs in gpu_*.cu behind AWQD_CUDA.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/device.h"
#include "kernels/plan/plan.h"
#include "kernels/weight.h"

namespace awqd::bench {

class LibraryWeights;  // library.h

struct Case {
  const KernelRow* row = nullptr;
  int64_t k = 0;
  int64_t n = 0;
  int64_t m = 0;  // 0: dequantize
  DType dtype = DType::kFp16;
  // How FP16 activations are rounded to E4M3 first; kNone: not at all.
  ActivationQuantization float8 = ActivationQuantization::kNone;
  // How to multiply; empty: as a server does, through QuantizedMatmul.
  std::function<absl::Status(const MatmulArgs&, StreamView)> product;
  // Not null: libawqd computes, with its own copies of the weight.
  LibraryWeights* libawqd = nullptr;
};

// A named time of the same run that a case is compared with.
struct Floor {
  std::string name;
  double microseconds = 0;
};

struct Result {
  Case spec;
  double microseconds = 0;  // of one call
  double error = 0;         // relative Frobenius, or 0 for equal bits
  std::vector<Floor> floors;
};

// One call per copy of the weight; copy `i` of `copies`.
using Call = std::function<void(int i, StreamView stream)>;

class Machine {
 public:
  virtual ~Machine() = default;
  virtual Device& device() = 0;
  // Bytes of weights that a round must touch to be cold.
  virtual int64_t cold_bytes() const = 0;
  // Microseconds of one call over rounds of all copies: the median, or the least on a shared
  // machine.
  virtual double Time(int copies, const Call& call) = 0;
  // Properties such as bandwidths, printed once.
  virtual std::string Facts() = 0;
  // Bounds of work that reads and writes `bytes` and makes `flops` operations, cold.
  virtual std::vector<Floor> LayerFloors(int64_t bytes, double flops) = 0;
  // Floors of a case whose packed weight has `packed_bytes`.
  virtual std::vector<Floor> Floors(const Case& spec, int64_t packed_bytes,
                                    const std::shared_ptr<const DeviceWeight>& weight) = 0;
};

// Returns null when `device` is not of the machine's kind.
std::unique_ptr<Machine> MakeCpuMachine(Device& device);
#ifdef AWQD_CUDA
std::unique_ptr<Machine> MakeCudaMachine(Device& device);
#endif

}  // namespace awqd::bench
