// Times and floors of the CPU: memory bandwidth on all threads, decode to FP32 + OpenBLAS.
#include <cblas.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <tuple>

#include "absl/strings/str_format.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/kernels.h"
#include "tests/bench/bench.h"

namespace awqd::bench {
namespace {

using Clock = std::chrono::steady_clock;

double Microseconds(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// The least time, because other programs share the cores and can only add time. Floors are measured
// the same way.
double Best(const std::vector<double>& v) { return *std::min_element(v.begin(), v.end()); }

class CpuMachine final : public Machine {
 public:
  explicit CpuMachine(Device& device) : device_(device), pool_(device.info().threads) { Measure(); }

  Device& device() override { return device_; }
  int64_t cold_bytes() const override { return int64_t{96} << 20; }

  double Time(int copies, const Call& call) override {
    for (int i = 0; i < copies; ++i) call(i, {});
    std::vector<double> samples;
    const auto begin = Clock::now();
    while (samples.size() < 5 || (Microseconds(begin) < 4e5 && samples.size() < 400)) {
      const auto start = Clock::now();
      call(static_cast<int>(samples.size()) % copies, {});
      samples.push_back(Microseconds(start));
    }
    return Best(samples);
  }

  std::string Facts() override {
    return absl::StrFormat("%s, %d threads, %s; read %.1f GB/s, write %.1f GB/s, copy %.1f GB/s",
                           device_.info().name, device_.info().threads,
                           std::string(Name(device_.info().isa)), read_ / 1e3, write_ / 1e3,
                           copy_ / 1e3);
  }

  std::vector<Floor> LayerFloors(int64_t bytes, double) override {
    return {{"stream", static_cast<double>(bytes) / read_}};
  }
  std::vector<Floor> Floors(const Case& spec, int64_t packed_bytes,
                            const std::shared_ptr<const DeviceWeight>& weight) override {
    if (spec.m == 0) {
      const double bytes = packed_bytes + spec.k * spec.n * SizeOf(spec.dtype);
      return {{"bandwidth", bytes / copy_}};
    }
    return {{"stream", packed_bytes / read_}, {"decode+sgemm", Baseline(spec, weight)}};
  }

 private:
  static constexpr int64_t kBytes = int64_t{256} << 20;

  // Bytes per microsecond of a loop over slices of `bytes`.
  template <typename Body>
  double Rate(int64_t bytes, Body body) {
    std::vector<double> samples;
    for (int i = 0; i < 7; ++i) {
      const auto start = Clock::now();
      pool_.ParallelFor(kBytes >> 18, [&](int64_t t, int) { body(t << 18, int64_t{1} << 18); });
      samples.push_back(Microseconds(start));
    }
    return bytes / Best(samples);
  }

  void Measure() {
    auto a = device_.Allocate(MemoryKind::kDevice, kBytes).value();
    auto b = device_.Allocate(MemoryKind::kDevice, kBytes).value();
    char* from = static_cast<char*>(a.data());
    char* to = static_cast<char*>(b.data());
    std::memset(from, 1, kBytes);
    std::memset(to, 1, kBytes);
    std::vector<uint64_t> sums(kBytes >> 18);
    read_ = Rate(kBytes, [&](int64_t at, int64_t size) {
      const uint64_t* words = reinterpret_cast<const uint64_t*>(from + at);
      uint64_t sum[8] = {};
      for (int64_t i = 0; i < size / 8; i += 8) {
        for (int j = 0; j < 8; ++j) sum[j] ^= words[i + j];
      }
      for (uint64_t s : sum) sums[at >> 18] ^= s;
    });
    write_ = Rate(kBytes, [&](int64_t at, int64_t size) { std::memset(to + at, 2, size); });
    // Read and written bytes both count.
    copy_ =
        Rate(2 * kBytes, [&](int64_t at, int64_t size) { std::memcpy(to + at, from + at, size); });
  }

  // Our own Dequantize to FP32, then one sgemm over all threads of OpenBLAS.
  double Baseline(const Case& spec, const std::shared_ptr<const DeviceWeight>& weight) {
    const auto key = std::make_tuple(spec.k, spec.n, spec.m);
    if (auto it = baselines_.find(key); it != baselines_.end()) return it->second;
    auto dense = device_.Allocate(MemoryKind::kDevice, spec.k * spec.n * 4).value();
    std::vector<float> x(spec.m * spec.k, 0.5f), y(spec.m * spec.n);
    openblas_set_num_threads(device_.info().threads);
    std::vector<double> samples;
    for (int i = 0; i < 6; ++i) {
      const auto start = Clock::now();
      const DequantizeArgs args = {weight.get(), {dense.data(), DType::kFp32, spec.k, spec.n}};
      if (!Dequantize(args, nullptr, {}).ok()) std::abort();
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(spec.m),
                  static_cast<int>(spec.n), static_cast<int>(spec.k), 1.0f, x.data(),
                  static_cast<int>(spec.k), static_cast<const float*>(dense.data()),
                  static_cast<int>(spec.n), 0.0f, y.data(), static_cast<int>(spec.n));
      if (i > 0) samples.push_back(Microseconds(start));
    }
    openblas_set_num_threads(1);
    return baselines_[key] = Best(samples);
  }

  Device& device_;
  ThreadPool pool_;
  double read_ = 0, write_ = 0, copy_ = 0;  // bytes per microsecond
  std::map<std::tuple<int64_t, int64_t, int64_t>, double> baselines_;
};

}  // namespace

std::unique_ptr<Machine> MakeCpuMachine(Device& device) {
  if (device.info().kind != DeviceKind::kCpu) return nullptr;
  return std::make_unique<CpuMachine>(device);
}

}  // namespace awqd::bench
