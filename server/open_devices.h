// Opens the devices of --device and makes their engines, all at the same time, because a GPU takes
// up to a second.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "server/config/options.h"
#include "server/engine/engine.h"
#include "server/server.h"

namespace awqd {

struct OpenedDevice {
  std::unique_ptr<Device> device;
  std::string why;      // the reason for its choice
  bool healthy = true;  // at the last check
};

// Opens every device of the option, in its order. Fails with the error of the first one in that
// order that cannot be opened; INVALID_ARGUMENT when a device is listed under two spellings.
absl::StatusOr<std::vector<OpenedDevice>> OpenDevices(const Options& options,
                                                      const DeviceOpener& open_device);

// Makes an engine for each device, in their order. The devices outlive the engines.
absl::StatusOr<std::vector<std::unique_ptr<engine::Engine>>> MakeEngines(
    const std::vector<Device*>& devices, const engine::EngineOptions& options);

}  // namespace awqd
