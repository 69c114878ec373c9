// Opens each device on a thread of its own.
#include "server/open_devices.h"

#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/base/parallel_for.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/local_engine.h"

namespace awqd {

absl::StatusOr<std::vector<OpenedDevice>> OpenDevices(const Options& options,
                                                      const DeviceOpener& open_device) {
  const std::vector<std::string> specs = absl::StrSplit(options.device, ',');
  std::vector<OpenedDevice> out(specs.size());
  std::vector<DeviceOptions> device_options;
  std::map<std::string, int> times;  // how often each device was listed
  for (const std::string& spec : specs) {
    const int before = times[spec]++;
    device_options.push_back({.cpu_threads = options.cpu_threads,
                              .budget_bytes = options.device_memory_limit,
                              .batch_invariant = options.batch_invariant,
                              .id_suffix = before == 0 ? "" : absl::StrCat("#", before + 1),
                              .cpu_pin_threads = options.cpu_pin_threads,
                              .cpu_interleave = options.cpu_interleave});
  }
  std::vector<absl::Status> ended(specs.size());
  ParallelFor(specs.size(), [&](size_t i) {
    auto device = open_device(specs[i], device_options[i], &out[i].why);
    ended[i] = device.status();
    if (device.ok()) out[i].device = *std::move(device);
  });
  for (const absl::Status& status : ended) AWQD_RETURN_IF_ERROR(status);
  std::set<std::string> ids;
  for (const OpenedDevice& opened : out) {
    if (ids.insert(opened.device->info().id).second) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--device: got \"", options.device,
                     "\", expected one spelling for each device, as in cuda:0,cuda:0"));
  }
  return out;
}

absl::StatusOr<std::vector<std::unique_ptr<engine::Engine>>> MakeEngines(
    const std::vector<Device*>& devices, const engine::EngineOptions& options) {
  std::vector<std::unique_ptr<engine::Engine>> out(devices.size());
  std::vector<absl::Status> ended(devices.size());
  ParallelFor(devices.size(), [&](size_t i) {
    auto engine = engine::MakeLocalEngine(devices[i], options);
    ended[i] = engine.status();
    if (engine.ok()) out[i] = *std::move(engine);
  });
  for (const absl::Status& status : ended) AWQD_RETURN_IF_ERROR(status);
  return out;
}

}  // namespace awqd
