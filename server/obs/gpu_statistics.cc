// Functions of NVML by name, and the thread that calls them.
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

// What NVML's functions take, as its ABI has it since driver 319.
struct NvmlUtilization {
  unsigned int gpu, memory;  // percent
};
struct NvmlMemory {
  unsigned long long total, free, used;  // bytes
};
using NvmlDevice = void*;
constexpr int kNvmlSuccess = 0;

// The library stays open: a driver's threads may be in it.
class Nvml {
 public:
  // Whether everything is there and the driver answers.
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

  // False when one of the answers is an error.
  bool Read(const std::string& pci_bus_id, GpuUse* out) const {
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

struct GpuMeter::State {
  const GpuMeterOptions options;
  Mutex mu;
  CondVar changed;
  int64_t asked ABSL_GUARDED_BY(mu) = 0, answered ABSL_GUARDED_BY(mu) = 0;
  Clock::time_point late ABSL_GUARDED_BY(mu);  // from when on nobody waits for that answer
  bool stopping ABSL_GUARDED_BY(mu) = false, ended ABSL_GUARDED_BY(mu) = false;
  std::map<std::string, GpuUse> uses ABSL_GUARDED_BY(mu);

  explicit State(GpuMeterOptions chosen) : options(std::move(chosen)) {}

  // On the thread. The lock is not held while the driver is asked.
  void Run() {
    Nvml nvml;
    bool tried = false, open = false;
    MutexLock lock(&mu);
    for (;;) {
      while (!stopping && asked == answered) changed.Wait(&mu);
      if (stopping) break;
      const int64_t question = asked;
      std::map<std::string, GpuUse> found;
      mu.Unlock();
      if (!std::exchange(tried, true)) open = nvml.Open(options.nvml);
      for (const std::string& id : options.pci_bus_ids) {
        if (GpuUse use; open && !id.empty() && nvml.Read(id, &use)) found[id] = use;
      }
      mu.Lock();
      answered = question;
      uses = std::move(found);
      changed.NotifyAll();
    }
    ended = true;
    changed.NotifyAll();
  }

  Clock::time_point Limit() const {
    return Clock::now() + absl::ToChronoNanoseconds(options.limit);
  }
};

GpuMeter::GpuMeter(GpuMeterOptions options) : state_(std::make_shared<State>(std::move(options))) {
  for (const std::string& id : state_->options.pci_bus_ids) {
    if (id.empty() || thread_.joinable()) continue;
    thread_ = std::thread([state = state_] { state->Run(); });
  }
}

GpuMeter::~GpuMeter() {
  if (!thread_.joinable()) return;
  bool ended;
  {
    MutexLock lock(&state_->mu);
    State& state = *state_;
    state.stopping = true;
    state.changed.NotifyAll();
    const Clock::time_point until = state.Limit();
    while (!state.ended && Clock::now() < until) state.changed.WaitUntil(&state.mu, until);
    ended = state.ended;
  }
  ended ? thread_.join() : thread_.detach();
}

std::map<std::string, GpuUse> GpuMeter::Read() {
  if (!thread_.joinable()) return {};
  State& state = *state_;
  MutexLock lock(&state.mu);
  if (state.asked == state.answered) {
    ++state.asked;
    state.late = state.Limit();
    state.changed.NotifyAll();
  }
  const int64_t question = state.asked;
  while (state.answered < question && Clock::now() < state.late) {
    state.changed.WaitUntil(&state.mu, state.late);
  }
  if (state.answered < question) return {};
  return state.uses;
}

}  // namespace awqd::obs
