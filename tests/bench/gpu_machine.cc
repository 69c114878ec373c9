// Times and floors of a GPU: one CUDA graph holds one call per copy of the weight; the figure is
// the median of its replays divided by the number of calls.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <tuple>

#include "absl/strings/str_format.h"
#include "kernels/base/math.h"
#include "kernels/cuda/core/cublaslt.h"
#include "kernels/cuda/core/error.h"
#include "tests/bench/bench.h"
#include "tests/bench/gpu_floors.h"

namespace awqd::bench {
namespace {

using cuda::CublasLt;

void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "awqd_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}
void Must(cudaError_t error, const char* call) { Must(cuda::Report(error, call)); }
void Must(cublasStatus_t status, const char* call) { Must(cuda::ToStatus(status, call)); }

double Median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + v.size() / 2, v.end());
  return v[v.size() / 2];
}

// A captured round of calls.
class Graph {
 public:
  Graph(int copies, const Call& call, StreamView view)
      : copies_(copies), stream_(static_cast<cudaStream_t>(view.handle)) {
    cudaGraph_t graph = nullptr;
    Must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "begin capture");
    for (int i = 0; i < copies; ++i) call(i, view);
    Must(cudaStreamEndCapture(stream_, &graph), "end capture");
    Must(cudaGraphInstantiate(&exec_, graph, 0), "instantiate");
    Must(cudaGraphDestroy(graph), "destroy graph");
    Must(cudaEventCreate(&begin_), "event");
    Must(cudaEventCreate(&end_), "event");
  }
  ~Graph() {
    Must(cudaGraphExecDestroy(exec_), "destroy graph");
    Must(cudaEventDestroy(begin_), "event");
    Must(cudaEventDestroy(end_), "event");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  double Replay() {
    Must(cudaEventRecord(begin_, stream_), "record");
    Must(cudaGraphLaunch(exec_, stream_), "launch graph");
    Must(cudaEventRecord(end_, stream_), "record");
    Must(cudaEventSynchronize(end_), "wait");
    float milliseconds = 0;
    Must(cudaEventElapsedTime(&milliseconds, begin_, end_), "elapsed");
    return milliseconds * 1e3;
  }

  // Makes at least `least` replays, and more while they are short.
  double MicrosecondsPerCall(int least) {
    Replay();
    std::vector<double> samples;
    double total = 0;
    while (static_cast<int>(samples.size()) < least || (samples.size() < 25 && total < 2e4)) {
      samples.push_back(Replay());
      total += samples.back();
    }
    return Median(samples) / copies_;
  }

 private:
  const int copies_;
  const cudaStream_t stream_;
  cudaGraphExec_t exec_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

class CudaMachine final : public Machine {
 public:
  explicit CudaMachine(Device& device) : device_(device) {
    stream_ = Value(device.CreateStream());
    pool_ = Take(kPool, 1);
    sink_ = Take(256, 2);
    read_ = kPool / Time(1, [&](int, StreamView s) {
              Must(ReadOnce(pool_.data(), kPool, Sms(), Sink(), s));
            });
  }

  Device& device() override { return device_; }
  int64_t cold_bytes() const override {
    return std::max<int64_t>(400'000'000, 8 * device_.info().l2_bytes);
  }

  double Time(int copies, const Call& call) override { return TimeAtLeast(copies, call, 7); }

  std::string Facts() override {
    int driver = 0;
    Must(cudaDriverGetVersion(&driver), "driver version");
    const CublasLt& lt = CublasLt::Get();
    return absl::StrFormat(
        "%s, sm_%d, %d SMs, L2 %d MB, CUDA driver %d.%d, cuBLASLt %s; read "
        "%.2f TB/s",
        device_.info().name, device_.info().arch, Sms(),
        static_cast<int>(device_.info().l2_bytes >> 20), driver / 1000, driver % 1000 / 10,
        lt.unavailable.empty() ? absl::StrFormat("%d", static_cast<int>(lt.version))
                               : lt.unavailable,
        read_ / 1e6);
  }

  std::vector<Floor> LayerFloors(int64_t bytes, double flops) override {
    constexpr double kFlopsPerUs = 750e6;  // 16-bit tensor cores, as the best kernels reach
    return {{"stream", static_cast<double>(bytes) / read_}, {"tensor", flops / kFlopsPerUs}};
  }

  std::vector<Floor> Floors(const Case& spec, int64_t packed_bytes,
                            const std::shared_ptr<const DeviceWeight>&) override {
    if (spec.m == 0) return {{"expand", ExpandFloor(spec, packed_bytes)}};
    std::vector<Floor> out = {{"stream", StreamFloor(packed_bytes)}};
    if (CublasLt::Get().unavailable.empty()) {
      out.push_back({"cublaslt", DenseFloor(spec.m, spec.n, spec.k)});
    }
    return out;
  }

 private:
  static constexpr int64_t kPool = int64_t{1} << 30;
  static constexpr int64_t kBlasBytes = int64_t{64} << 20;

  template <typename T>
  static T Value(absl::StatusOr<T> or_value) {
    Must(or_value.status());
    return *std::move(or_value);
  }

  int Sms() const { return device_.info().sm_count; }
  uint32_t* Sink() const { return static_cast<uint32_t*>(sink_.data()); }

  // Memory with random values.
  Buffer Take(int64_t bytes, uint64_t seed) {
    Buffer out = Value(device_.Allocate(MemoryKind::kDevice, bytes));
    Must(FillRandom(out.data(), bytes, seed, stream_->view()));
    Must(stream_->Synchronize());
    return out;
  }

  double TimeAtLeast(int copies, const Call& call, int least) {
    Must(cuda::UseDevice(device_.info().index));
    // Loads modules and chooses algorithms before the capture.
    call(0, stream_->view());
    Must(stream_->Synchronize());
    return Graph(copies, call, stream_->view()).MicrosecondsPerCall(least);
  }

  // The number of copies of `bytes` in the pool that make a round cold.
  int CopiesOf(int64_t bytes) const {
    return static_cast<int>(
        std::max<int64_t>(1, std::min(kPool, cold_bytes() + bytes) / RoundUp(bytes, 16)));
  }
  const char* CopyAt(int i, int64_t bytes) const {
    return static_cast<const char*>(pool_.data()) + i * RoundUp(bytes, 16);
  }

  double StreamFloor(int64_t bytes) {
    bytes = bytes / 16 * 16;
    double& floor = streams_[bytes];
    if (floor == 0) {
      floor = Time(CopiesOf(bytes), [&](int i, StreamView s) {
        Must(ReadOnce(CopyAt(i, bytes), bytes, Sms(), Sink(), s));
      });
    }
    return floor;
  }

  double ExpandFloor(const Case& spec, int64_t bytes) {
    double& floor = expands_[{bytes, SizeOf(spec.dtype)}];
    if (floor == 0) {
      const int64_t weights = spec.k * spec.n;
      const Buffer out = Value(device_.Allocate(MemoryKind::kDevice, weights * SizeOf(spec.dtype)));
      const int copies = CopiesOf(RoundUp(bytes, 16));
      floor = Time(copies, [&](int i, StreamView s) {
        Must(Expand(CopyAt(i, bytes), bytes, weights, spec.dtype, out.data(), s));
      });
    }
    return floor;
  }

  // FP16 weights [N, K], as checkpoints have them; the best of cuBLASLt's first ten algorithms.
  double DenseFloor(int64_t m, int64_t n, int64_t k) {
    double& best = dense_[{m, n, k}];
    if (best != 0) return best;
    const CublasLt& lt = CublasLt::Get();
    const cublasLtHandle_t handle = Value(cuda::CublasLtHandle());
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t w, x, y;
    const cublasOperation_t transpose = CUBLAS_OP_T;
    Must(lt.desc_init(&op, sizeof(op), CUBLAS_COMPUTE_32F, CUDA_R_32F), "desc");
    Must(lt.desc_set(&op, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)), "transpose");
    Must(lt.layout_init(&w, sizeof(w), CUDA_R_16F, k, n, k), "w");
    Must(lt.layout_init(&x, sizeof(x), CUDA_R_16F, k, m, k), "x");
    Must(lt.layout_init(&y, sizeof(y), CUDA_R_16F, n, m, n), "y");
    cublasLtMatmulPreferenceOpaque_t preference;
    const uint64_t most = kBlasBytes;
    Must(lt.preference_init(&preference, sizeof(preference)), "preference");
    Must(lt.preference_set(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most,
                           sizeof(most)),
         "preference");
    cublasLtMatmulHeuristicResult_t algorithms[10] = {};
    int found = 0;
    Must(lt.heuristic(handle, &op, &w, &x, &y, &y, &preference, 10, algorithms, &found),
         "heuristic");
    const Buffer tokens = Take(m * k * 2, 3), out = Take(m * n * 2, 4), space = Take(kBlasBytes, 5);
    const int64_t bytes = n * k * 2;
    const Buffer big = bytes > kPool ? Take(bytes, 6) : Buffer();
    const float one = 1, zero = 0;
    const auto call = [&](int a) -> Call {
      return [&, a](int i, StreamView s) {
        Must(lt.matmul(handle, &op, &one, big ? big.data() : CopyAt(i, bytes), &w, tokens.data(),
                       &x, &zero, out.data(), &y, out.data(), &y, &algorithms[a].algo, space.data(),
                       kBlasBytes, static_cast<cudaStream_t>(s.handle)),
             "cublasLtMatmul");
      };
    };
    const int copies = big ? 1 : CopiesOf(bytes);
    int winner = -1;
    for (int a = 0; a < found; ++a) {
      if (algorithms[a].state != CUBLAS_STATUS_SUCCESS) continue;
      const double time = TimeAtLeast(copies, call(a), 2);
      if (winner < 0 || time < best) {
        best = time;
        winner = a;
      }
    }
    if (winner < 0) Must(absl::UnimplementedError("cuBLASLt found no algorithm"));
    return best = Time(copies, call(winner));
  }

  Device& device_;
  std::unique_ptr<Stream> stream_;
  Buffer pool_, sink_;
  double read_ = 0;  // bytes per microsecond
  std::map<int64_t, double> streams_;
  std::map<std::pair<int64_t, int64_t>, double> expands_;
  std::map<std::tuple<int64_t, int64_t, int64_t>, double> dense_;
};

}  // namespace

std::unique_ptr<Machine> MakeCudaMachine(Device& device) {
  if (device.info().kind != DeviceKind::kCuda) return nullptr;
  return std::make_unique<CudaMachine>(device);
}

}  // namespace awqd::bench
