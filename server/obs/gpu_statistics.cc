// Looks NVML's functions up by name, and calls them on a thread.
#include "server/obs/gpu_statistics.h"

#include <dlfcn.h>

#include <chrono>
#include <type_traits>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "kernels/base/mutex.h"

namespace awqd::obs {
namespace {

using Clock = std::chrono::steady_clock;

// Arguments of NVML's functions, with the ABI that they have since driver 319.
struct NvmlUtilization {
  unsigned int gpu, memory;  // percent
};
struct NvmlMemory {
  unsigned long long total, free, used;  // bytes
};
using NvmlDevice = void*;
constexpr int kNvmlSuccess = 0;

// The library is never closed, because threads of the driver may run in it.
class Nvml {
 public:
  // Returns true if the library has every function and the driver answers.
  bool Open(const std::string& name) {
    void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    const auto find = [library](const char* function, auto* pointer) {
      *pointer = reinterpret_cast<std::decay_t<decltype(*pointer)>>(dlsym(library, function));
      return *pointer != nullptr;
    };
    int (*init)() = nullptr;
    return find("nvmlInit_v2", &init) && find("nvmlDeviceGetHandleByPciBusId_v2", &handle_) &&
           find("nvmlDeviceGetUtilizationRates", &utilization_) &&
           find("nvmlDeviceGetMemoryInfo", &memory_) && init() == kNvmlSuccess;
  }

  // Returns false when one of NVML's functions returns an error.
  bool Read(const std::string& pci_bus_id, GpuStatistics* out) const {
    NvmlDevice device = nullptr;
    NvmlUtilization busy = {};
    NvmlMemory memory = {};
    if (handle_(pci_bus_id.c_str(), &device) != kNvmlSuccess ||
        utilization_(device, &busy) != kNvmlSuccess || memory_(device, &memory) != kNvmlSuccess) {
      return false;
    }
    *out = {.utilization = busy.gpu / 100.0,
            .memory_used_bytes = static_cast<int64_t>(memory.used)};
    return true;
  }

 private:
  int (*handle_)(const char*, NvmlDevice*) = nullptr;
  int (*utilization_)(NvmlDevice, NvmlUtilization*) = nullptr;
  int (*memory_)(NvmlDevice, NvmlMemory*) = nullptr;
};

}  // namespace

struct GpuStatisticsReader::State {
  const GpuStatisticsOptions options;
  Mutex mu;
  CondVar changed;
  int64_t asked ABSL_GUARDED_BY(mu) = 0, answered ABSL_GUARDED_BY(mu) = 0;
  Clock::time_point late ABSL_GUARDED_BY(mu);  // when Read gives that answer up
  bool stopping ABSL_GUARDED_BY(mu) = false, ended ABSL_GUARDED_BY(mu) = false;
  std::map<std::string, GpuStatistics> statistics ABSL_GUARDED_BY(mu);

  explicit State(GpuStatisticsOptions chosen) : options(std::move(chosen)) {}

  // Runs on the thread. Releases the lock while it calls the driver.
  void Run() {
    Nvml nvml;
    bool tried = false, open = false;
    MutexLock lock(&mu);
    for (;;) {
      while (!stopping && asked == answered) changed.Wait(&mu);
      if (stopping) break;
      const int64_t question = asked;
      std::map<std::string, GpuStatistics> found;
      mu.Unlock();
      if (!std::exchange(tried, true)) open = nvml.Open(options.nvml);
      for (const std::string& id : options.pci_bus_ids) {
        if (GpuStatistics gpu; open && !id.empty() && nvml.Read(id, &gpu)) found[id] = gpu;
      }
      mu.Lock();
      answered = question;
      statistics = std::move(found);
      changed.NotifyAll();
    }
    ended = true;
    changed.NotifyAll();
  }

  Clock::time_point Deadline() const {
    return Clock::now() + absl::ToChronoNanoseconds(options.limit);
  }
};

GpuStatisticsReader::GpuStatisticsReader(GpuStatisticsOptions options)
    : state_(std::make_shared<State>(std::move(options))) {
  for (const std::string& id : state_->options.pci_bus_ids) {
    if (id.empty() || thread_.joinable()) continue;
    thread_ = std::thread([state = state_] { state->Run(); });
  }
}

GpuStatisticsReader::~GpuStatisticsReader() {
  if (!thread_.joinable()) return;
  bool ended;
  {
    MutexLock lock(&state_->mu);
    State& state = *state_;
    state.stopping = true;
    state.changed.NotifyAll();
    const Clock::time_point until = state.Deadline();
    while (!state.ended && Clock::now() < until) state.changed.WaitUntil(&state.mu, until);
    ended = state.ended;
  }
  ended ? thread_.join() : thread_.detach();
}

std::map<std::string, GpuStatistics> GpuStatisticsReader::Read() {
  if (!thread_.joinable()) return {};
  State& state = *state_;
  MutexLock lock(&state.mu);
  if (state.asked == state.answered) {
    ++state.asked;
    state.late = state.Deadline();
    state.changed.NotifyAll();
  }
  const int64_t question = state.asked;
  while (state.answered < question && Clock::now() < state.late) {
    state.changed.WaitUntil(&state.mu, state.late);
  }
  if (state.answered < question) return {};
  return state.statistics;
}

}  // namespace awqd::obs
