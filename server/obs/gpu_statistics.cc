// Looks NVML's functions up by name, and calls them on a thread.
#include "server/obs/gpu_statistics.h"

#include <dlfcn.h>

#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "absl/algorithm/container.h"

namespace awqd::obs {
namespace {

constexpr int kNvmlSuccess = 0;

bool IsReady(std::future_status status) { return status == std::future_status::ready; }

}  // namespace

// Used by one thread at a time. The library is never closed, because threads of the driver may run
// in it.
class Nvml {
 public:
  explicit Nvml(GpuStatisticsOptions options) : options_(std::move(options)) {}

  // The first call opens the library. GPUs for which it returns an error are left out.
  GpuStatisticsReader::Statistics ReadAll() {
    if (!std::exchange(tried_, true)) open_ = Open();
    GpuStatisticsReader::Statistics out;
    for (const std::string& id : options_.pci_bus_ids) {
      if (GpuStatistics gpu; open_ && !id.empty() && ReadGpu(id, &gpu)) out[id] = gpu;
    }
    return out;
  }

 private:
  // Arguments of NVML's functions, with the ABI that they have since driver 319.
  struct Utilization {
    unsigned int gpu, memory;  // percent
  };
  struct Memory {
    unsigned long long total, free, used;  // bytes
  };
  using DeviceHandle = void*;

  // Returns true if the library has every function and the driver answers.
  bool Open() {
    void* const library = dlopen(options_.nvml.c_str(), RTLD_NOW | RTLD_LOCAL);
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
  bool ReadGpu(const std::string& pci_bus_id, GpuStatistics* out) const {
    DeviceHandle device = nullptr;
    Utilization busy = {};
    Memory memory = {};
    if (handle_(pci_bus_id.c_str(), &device) != kNvmlSuccess ||
        utilization_(device, &busy) != kNvmlSuccess || memory_(device, &memory) != kNvmlSuccess) {
      return false;
    }
    *out = {.utilization = busy.gpu / 100.0,
            .memory_used_bytes = static_cast<int64_t>(memory.used)};
    return true;
  }

  const GpuStatisticsOptions options_;
  bool tried_ = false, open_ = false;
  int (*handle_)(const char*, DeviceHandle*) = nullptr;
  int (*utilization_)(DeviceHandle, Utilization*) = nullptr;
  int (*memory_)(DeviceHandle, Memory*) = nullptr;
};

GpuStatisticsReader::GpuStatisticsReader(GpuStatisticsOptions options)
    : limit_(options.limit),
      nvml_(absl::c_all_of(options.pci_bus_ids, [](const auto& id) { return id.empty(); })
                ? nullptr
                : std::make_shared<Nvml>(std::move(options))) {}

GpuStatisticsReader::~GpuStatisticsReader() {
  MutexLock lock(&mu_);
  if (answer_.valid()) answer_.wait_for(absl::ToChronoNanoseconds(limit_));
}

GpuStatisticsReader::Statistics GpuStatisticsReader::Read() {
  if (nvml_ == nullptr) return {};
  std::shared_future<Statistics> answer;
  std::chrono::steady_clock::time_point late;
  {
    MutexLock lock(&mu_);
    if (!answer_.valid() || IsReady(answer_.wait_for(std::chrono::seconds(0)))) {
      std::packaged_task<Statistics()> task([nvml = nvml_] { return nvml->ReadAll(); });
      answer = task.get_future().share();
      try {
        std::thread(std::move(task)).detach();
      } catch (const std::system_error&) {
        return {};  // the process can start no thread now
      }
      answer_ = answer;
      late_ = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(limit_);
    }
    answer = answer_;
    late = late_;
  }
  return IsReady(answer.wait_until(late)) ? answer.get() : Statistics();
}

}  // namespace awqd::obs
